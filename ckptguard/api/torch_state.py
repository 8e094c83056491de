"""From bytes that were verified to a state: tensors and plain values, and never code."""

from __future__ import annotations

import io
import json
import operator
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from ckptguard.api.held_bytes import HeldFile
from ckptguard.errors import SettingsError, StateError
from ckptguard.formats.dcp.chunks import chunk_name, offsets_in
from ckptguard.layouts.own import LAYOUT as OWN
from ckptguard.layouts.own import MODEL_FILE, OPTIMIZER_FILE, STATE_FILE
from ckptguard.layouts.roles import file_role
from ckptguard.values.ids import escape
from ckptguard.values.own_log import log as _log

_SAFE_SINCE = (2, 6)  # before, a file could make torch.load run code in spite of weights_only
_WEIGHTS = ("model", "pytorch_model")
_LONGEST_NAME = 500  # of a tensor of torch.distributed.checkpoint: longer ones were cut


class Loadable(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was verified: its files by their names inside of it. `alone`: the file that stands for it."""

    layout: str
    files: dict[str, HeldFile]
    alone: str | None = None


def device_of(map_location: Any) -> Any:
    """The torch device that is meant. SettingsError for what is none, or where torch cannot be used."""
    try:
        import torch
    except ImportError as error:
        raise SettingsError("loading needs torch, which is not installed", hint="pip install torch") from error
    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < _SAFE_SINCE:
        raise SettingsError(
            f"torch {torch.__version__} can be made to run code by a file that it loads", hint="install torch 2.6"
        )
    try:
        device = torch.device(map_location)
        return torch.device("cpu") if device.type == "cpu" else device  # torch.load does not know cpu:0
    except (RuntimeError, TypeError) as error:
        raise SettingsError(
            f'map_location must be a device such as "cpu" or "cuda:0", not {map_location!r:.80}'
        ) from error


def state_of(found: Loadable, device: Any) -> Any:
    """What `ckptguard.load` answers. StateError if a file cannot be loaded without running what it names."""
    files = found.files  # what is loaded is let go at once: memory holds one file twice, and no more
    if found.alone is not None:
        return _content(found.alone, files.pop(found.alone), device)
    if found.layout == OWN.name:
        return _own(files, device)
    return dict(_parts(files, device))


def _parts(files: dict[str, HeldFile], device: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a folder, by the names of their files without suffixes: the weights are "model"."""
    taken: set[str] = set()
    for name, content in _merged(files, device):
        folder, slash, file = name.rpartition("/")
        parts = {folder + slash + _stem(file): content}
        if file == ".metadata":
            parts = {folder: content} if folder else content
        for part, inner in parts.items():
            unique = name if part in taken else part  # model.safetensors beside pytorch_model.bin
            taken.add(unique)
            yield unique, inner


def _merged(files: dict[str, HeldFile], device: Any) -> Iterator[tuple[str, Any]]:
    """(file, content) of all that holds state; shards are one dict, under the name of their index."""
    indexed = {name: shards for name in sorted(files) if (shards := _shards(name, files[name]))}
    for name, shards in indexed.items():
        del files[name]
        if any(shards == other for before, other in indexed.items() if before < name):  # the same shards once more
            continue
        whole: dict[str, Any] = {}
        for shard in filter(files.__contains__, shards):
            wanted_again = any(shard in other for later, other in indexed.items() if later > name)
            content = _content(shard, files[shard] if wanted_again else files.pop(shard), device)
            if not isinstance(content, dict):
                raise StateError(f"{escape(shard)} cannot be put together with other shards: it holds no dict")
            whole |= content
        yield name.removesuffix(".index.json"), whole
    for shard in {shard for shards in indexed.values() for shard in shards}:
        files.pop(shard, None)
    for name in sorted(files):
        structure = files[name].scanned.structure
        if structure.format == "dcp_metadata":
            if name.rpartition("/")[2] != ".metadata":
                raise StateError(
                    f"{escape(name)} describes what one rank saved by itself",
                    hint="load it with torch, on as many ranks",
                )
            yield name, _distributed(name, files, device)
        elif structure.format == "trainer_state":
            with _in_our_words(name):
                content = json.loads(bytes(files[name].data))
            yield name, content
        elif structure.format in _READERS and file_role(name) != "other":
            yield name, _content(name, files.pop(name), device)
        elif structure.format == "pickle":
            _log.warning("%s is a pickle of its own, which can run code: it was not loaded", escape(name))


def _shards(index: str, held: HeldFile) -> list[str]:
    """The files that an index names, by their names inside the checkpoint."""
    folder, slash, _ = index.rpartition("/")
    return [folder + slash + shard for shard in sorted(set((held.scanned.structure.weight_map or {}).values()))]


def _stem(file: str) -> str:
    stem = file.partition(".")[0]
    return "model" if stem in _WEIGHTS else stem


def _content(name: str, held: HeldFile, device: Any) -> Any:
    """What one file holds."""
    read = _READERS.get(held.scanned.structure.format)
    if read is None:
        kind = held.scanned.structure.format
        raise StateError(f"{escape(name)} cannot be loaded: its format is {kind}, not torch's or safetensors")
    with _in_our_words(name):
        return read(held, device)


def _safetensors(held: HeldFile, device: Any) -> dict[str, Any]:
    """Every tensor as a copy of its own. Of the header's metadata nothing is state."""
    import torch

    structure, data = held.scanned.structure, memoryview(held.data)
    if offsets_in(structure):
        raise StateError("it holds pieces of tensors", hint="put them together by torch.distributed.checkpoint")
    state = {}
    for place in structure.tensors:
        dtype = getattr(torch, place.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise StateError(f"{escape(place.name)} is of type {place.dtype}, which this torch does not know")
        tensor = torch.empty(place.shape, dtype=dtype)
        if place.span is not None:
            span = structure.spans[place.span]
            raw = torch.frombuffer(data, dtype=torch.uint8, count=span.length, offset=span.offset)
            tensor.reshape(-1).view(torch.uint8).copy_(raw)
        state[place.name] = tensor.to(device)
    return state


def _torch(held: HeldFile, device: Any) -> Any:
    return _unpickled(memoryview(held.data), device)


def _numpy(held: HeldFile, device: Any) -> Any:
    import numpy

    found = numpy.load(io.BytesIO(held.data), allow_pickle=False)
    if not isinstance(found, numpy.lib.npyio.NpzFile):
        return found
    names = set(found.zip.namelist() if found.zip is not None else ())
    if any(name.endswith(".npy") and name.removesuffix(".npy") in names for name in names):
        raise StateError("it holds two records that numpy takes for one array")
    return dict(found)


def _unpickled(data: memoryview, device: Any) -> Any:
    """Return what torch.load makes of these bytes. Beyond its own types it may load numpy arrays and namespaces."""
    import argparse
    import types

    import numpy
    import torch

    made: list[Any] = [numpy.empty(0).__reduce__()[0], numpy.float64(0).__reduce__()[0]]
    old = [(call, f"numpy.core.multiarray.{call.__name__}") for call in made]  # as numpy 1 called them
    plain = [numpy.ndarray, numpy.dtype, argparse.Namespace, types.SimpleNamespace]
    kinds = [type(numpy.dtype(kind)) for kind in "?bhilqBHILQefdFDSU"]
    with torch.serialization.safe_globals([*made, *old, *plain, *kinds]):
        return torch.load(io.BufferedReader(_File(data)), map_location=device, weights_only=True)


class _File(io.RawIOBase):
    """Bytes in memory as an open file, without a copy of them."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def _distributed(metadata: str, files: Mapping[str, HeldFile], device: Any) -> dict[str, Any]:
    """What torch.distributed.checkpoint saved, put together again: whole tensors, by the names of the state dict. What
    lies in a container (``model.fc.weight``) lies in a dict of its name."""
    import torch

    folder = metadata.rpartition("/")[0]
    structure = files[metadata].scanned.structure
    shapes = {tensor.name: tensor.shape for tensor in structure.tensors}
    state: dict[str, Any] = {}
    for file, chunks in structure.chunks.items():
        held = files.get(f"{folder}/{file}" if folder else file)
        if held is None:
            raise StateError(f"{escape(file)} is not there")
        for chunk in chunks:
            with _in_our_words(chunk_name(chunk)):
                if len(chunk.name) > _LONGEST_NAME or chunk.packed:
                    raise StateError("it is compressed, or its name is too long")
                piece = _unpickled(memoryview(held.data)[chunk.offset : chunk.offset + chunk.length], "cpu")
                if not chunk.dtype:
                    state[chunk.name] = piece
                else:
                    whole = state.setdefault(chunk.name, torch.empty(shapes[chunk.name], dtype=piece.dtype))
                    ends = map(operator.add, chunk.offsets, chunk.shape)
                    whole[tuple(map(slice, chunk.offsets, ends))] = piece
    nested: dict[str, Any] = {}
    for name, value in state.items():
        first, _, rest = name.partition(".")
        with _in_our_words(name):
            on_device = value.to(device) if isinstance(value, torch.Tensor) else value
            if rest and first in structure.containers:
                nested.setdefault(first, {})[rest] = on_device
            else:
                nested[name] = on_device
    return nested


def _own(files: dict[str, HeldFile], device: Any) -> dict[str, Any]:
    """What a `TrainingGuard` saved: "model", "optimizer" and the rest as their state dicts, and "step"."""
    from ckptguard.training.content.tagged_json import decode_state, from_text
    from ckptguard.training.saving.own_layout import STATE_FORMAT

    state = from_text(bytes(files[STATE_FILE].data))
    if state.pop("ckptguard_state", None) != STATE_FORMAT:
        raise StateError(f"{STATE_FILE} has a format that this version does not know", hint="upgrade ckptguard")
    found: dict[str, Any] = {}
    if MODEL_FILE not in files:  # of several ranks: each has a part of its own of "ranks"
        metadata = next(name for name in files if files[name].scanned.structure.format == "dcp_metadata")
        found |= _distributed(metadata, files, device)
        state.pop("ranks", None)
        return found | {key: decode_state(value) for key, value in state.items()}
    model = _content(MODEL_FILE, files[MODEL_FILE], device)
    others = _content(OPTIMIZER_FILE, files[OPTIMIZER_FILE], device) if OPTIMIZER_FILE in files else {}
    for key, value in state.items():
        try:
            decoded = decode_state(value, others)
        except StateError:
            if key == "model" or OPTIMIZER_FILE in files:
                raise
            continue  # thinning took its tensors
        if key == "model" and not isinstance(decoded, dict):
            raise StateError(f"{STATE_FILE}: what it says of the model is no dict")
        found[key] = {**model, **decoded} if key == "model" else decoded
    return found


@contextmanager
def _in_our_words(name: str) -> Iterator[None]:
    """StateError for what torch, or a decoder, cannot load."""
    try:
        yield
    except (StateError, MemoryError) as error:
        if isinstance(error, StateError) and not error.message.startswith(name):
            raise StateError(f"{escape(name)}: {error.message}", hint=error.hint) from error
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        hint = "torch.serialization.add_safe_globals allows what it names, if you know what that is"
        raise StateError(
            f"{escape(name)} is good, but torch does not load it: {escape(first[:300])}",
            hint=hint if isinstance(error, pickle.UnpicklingError) else None,
        ) from error


_READERS = {"safetensors": _safetensors, "torch_zip": _torch, "torch_legacy": _torch, "npz": _numpy, "npy": _numpy}
