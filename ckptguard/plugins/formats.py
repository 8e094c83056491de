"""Files that only a plugin can read: what it says of one becomes a structure, which our own scan then measures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import msgspec

from ckptguard.formats.dtypes import DTYPES, is_countable
from ckptguard.formats.strict_json import printable
from ckptguard.formats.structure import Found, Problem, SpanPlace, Structure, TensorPlace
from ckptguard.formats.table import FIRST_BYTES, format_of
from ckptguard.plugins.call import CALL_SECONDS, PluginError, call_plugin
from ckptguard.plugins.installed import Plugin, format_plugin
from ckptguard.plugins.interface import FileContents
from ckptguard.storage.protocol import Storage
from ckptguard.values.manifest import BY_PLUGIN
from ckptguard.values.settings import Settings

_LONGEST_NAME = 1000
_LEAST_RATE = 20e6  # bytes a second that a plugin must read
_BESIDE = 1024  # bytes for each tensor, and for the file, that may be in no tensor


def structures_by_plugins(
    storage: Storage, names: Mapping[str, str], settings: Settings, stopped: Callable[[], bool] = bool
) -> dict[str, Structure]:
    """Return the structures of those local files that no format of ours explains and a plugin claims, by their keys.
    `names` are the names that they were saved under, by key. A plugin that took too long for one is not asked about the
    others. Raises the storage's errors, and WorkerError once it is `stopped`."""
    found, late = {}, set[str]()
    for key, name in names.items():
        plugin = format_plugin(name)
        if plugin is None or storage.root is None:
            continue
        with storage.open(key) as reader:
            size = reader.entry.size
            opaque = format_of(name, reader.read(0, min(size, FIRST_BYTES))).name == "opaque"
        if opaque and plugin.label in late:
            found[key] = _unknown(plugin.label, f"the plugin {plugin.label} took too long for another file")
        elif opaque:
            path, seconds = f"{storage.root.rstrip('/')}/{key}", CALL_SECONDS + size / _LEAST_RATE
            until = time.monotonic() + seconds
            found[key] = _read(plugin, path, size, settings.worker_memory, seconds, stopped)
            late |= {plugin.label} if time.monotonic() >= until else set()
    return found


def _read(plugin: Plugin, path: str, size: int, memory: int, seconds: float, stopped: Callable[[], bool]) -> Structure:
    try:
        contents = call_plugin(plugin, path, FileContents, memory=memory, seconds=seconds, stopped=stopped)
        return structure_of(contents, size, plugin.label)
    except PluginError as error:
        return _unknown(plugin.label, error.message)


def structure_of(contents: FileContents, size: int, label: str) -> Structure:
    """Return the structure of a file of this size. What cannot be true of it makes all of it not understood."""
    found, held, end, names = Found(), 0, 0, set[str]()
    found.truncated = contents.truncated
    for problem in contents.problems:
        found.add(Problem(printable(problem)))
    found.not_understood += map(printable, contents.not_understood)
    for tensor in sorted(contents.tensors, key=lambda one: one.offset):
        shown, dtype = printable(tensor.name, _LONGEST_NAME), DTYPES.get(tensor.dtype)
        if dtype is None:
            found.not_understood.append(f"tensor {shown!r} of type {printable(tensor.dtype)!r}")
            continue
        countable = 0 < len(tensor.name) <= _LONGEST_NAME and is_countable(tensor.shape, dtype.size)
        count = math.prod(tensor.shape) if countable else -1
        stop = tensor.offset + count * dtype.size
        if count < 0 or not end <= tensor.offset <= stop <= size or shown in names:
            return _unknown(label, f"the plugin {label} states an impossible tensor {printable(shown)!r}")
        names.add(shown)
        span = len(found.spans) if count else None
        if count:
            found.spans.append(SpanPlace(tensor.offset, stop - tensor.offset))
        end, held = stop, held + stop - tensor.offset
        place = TensorPlace(shown, tensor.dtype, tensor.shape, span, 0, count, byte_order=tensor.byte_order)
        found.tensors.append(place)
    if not (found.problems or found.truncated or found.not_understood):
        beside = size - held - sum(len(name.encode()) for name in names)
        if not found.spans:
            return _unknown(label, f"the plugin {label} states no tensor with content")
        if beside > _BESIDE * (len(names) + 1):
            return _unknown(label, f"the plugin {label} states no tensor for {beside} bytes of it")
    return msgspec.structs.replace(found.structure(BY_PLUGIN), plugin=label)


def _unknown(label: str, why: str) -> Structure:
    return Structure(format=BY_PLUGIN, not_understood=(f"what it holds ({why})",), plugin=label)
