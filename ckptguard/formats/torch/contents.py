"""The content of pickles, read within one budget, and of files that they hold as bytes.

Layers pickle their own state into bytes or a tensor of bytes (`_extra_state`), and plain pickles hold each tensor as a
file. No span of the outer file shows such numbers to the scan, so they are checked here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
from msgspec import structs

from ckptguard.formats.dtypes import DTYPES
from ckptguard.formats.nonfinite_bytes import SIZES, bad_number
from ckptguard.formats.pickle.inert_values import Call
from ckptguard.formats.pickle.machine import BUDGET, Pickled
from ckptguard.formats.pickle.numpy_values import raw_bytes
from ckptguard.formats.structure import Found, Leaf, Structure, TensorPlace, broken, holds_bytes
from ckptguard.formats.suffixes import LEGACY_MAGIC, NUMPY_MAGIC, ZIP_MAGIC, is_marked_pickle, is_safetensors
from ckptguard.formats.torch.rebuild_calls import Described
from ckptguard.formats.torch.state_tree import MAX_NODES, MAX_UNREAD, FileValue, below, walk
from ckptguard.formats.zip.crc import crc32_function
from ckptguard.storage.protocol import Entry

LOADS_BYTES = "torch.storage._load_from_bytes"
_DEEPEST = 16  # files inside files
_MOST_LEAVES = 1000  # of one file inside a file
_LARGEST_UNMARKED = 16 << 20


class ReadingBudget(msgspec.Struct):
    """What reading pickles may still cost, for all archives that share it. `depth`: how many files contain it.

    Each existing storage adds `each`, because tensors with their own storages take about as much.
    """

    budget: int = BUDGET
    each: int = 0
    nodes: int = MAX_NODES
    depth: int = 0


class InMemory:
    """Bytes as a `Source`."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.entry = Entry(key="", kind="file", size=len(raw))

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes; fewer at the end."""
        return self.raw[offset : offset + length]


def take(
    pickled: Pickled, room: ReadingBudget, found: Found, prefix: str = "", loads: Iterable[Call] = ()
) -> list[tuple[str, Described]]:
    """Record the content of a pickle except the tensors, which are returned. `loads` are its calls of torch's loader
    for bytes: if all of these are read, loading them does nothing else."""
    tree = walk(pickled, room.nodes)
    room.budget -= pickled.cost
    room.nodes -= tree.visited
    found.problems += tree.problems
    found.leaves += (structs.replace(leaf, name=prefix + leaf.name) for leaf in tree.leaves) if prefix else tree.leaves
    found.unread += [prefix + name for name in tree.unread]
    if not prefix:
        found.containers = tree.containers
    files = {id(file.value): file for file in tree.files}
    calls = {id(call): FileValue("value", call) for call in loads}
    read = {key for key, file in {**calls, **files}.items() if _take_value(found, prefix, file, room)}
    found.names |= pickled.globals - ({LOADS_BYTES} if calls and calls.keys() <= read else set())
    return tree.tensors


def _take_value(found: Found, prefix: str, file: FileValue, room: ReadingBudget) -> bool:
    name, raw = prefix + file.name, raw_bytes(file.value)
    known = raw is not None and take_file(found, name, raw, room, file.dtype)
    if type(file.value) is not Call or not file.value.calls(LOADS_BYTES):
        return known
    known = known and raw is not None and raw.startswith((ZIP_MAGIC, LEGACY_MAGIC))
    if not known:
        _not_read(found, name)
    return known


def take_file(found: Found, name: str, raw: bytes, room: ReadingBudget, dtype: str = "") -> bool:
    """Record the content of bytes that are a file: numbers that are not finite, names, unread parts.

    Returns whether it is a file that was read completely. Bytes that only look like one are not read, and are no
    problem of the outer file. `dtype`: the type of its storage, if it does not state it.
    """
    room.depth += 1
    try:
        inner = _structure_of(raw, room) if room.depth <= _DEEPEST else broken("", "it is nested in too many files")
        if inner is None:
            return False
        found.names.update(inner.globals)
        if inner.problems or inner.truncated or not _sums_are_right(inner, raw):
            _not_read(found, name)
            return False
        if dtype and inner.unread == ("value",) and len(inner.tensors) == 1:
            inner = structs.replace(inner, unread=(), tensors=(_of_dtype(inner.tensors[0], dtype),))
        for leaf in [leaf for leaf in inner.leaves if not math.isfinite(leaf.value)][:_MOST_LEAVES]:
            found.leaves.append(structs.replace(leaf, name=below(name, leaf.name)))
        opened = _take_tensors(found, name, inner, raw, room)
        for part in inner.unread:
            if part not in opened:
                _not_read(found, below(name, part))
        return True
    finally:
        room.depth -= 1


def _structure_of(raw: bytes, room: ReadingBudget) -> Structure | None:
    """Return the structure of bytes that begin and end like a file; None if they are not one."""
    from ckptguard.formats import safetensors  # these use this module for nested files
    from ckptguard.formats.torch import pickle_files, zip_file

    source = InMemory(raw)
    if raw.startswith(ZIP_MAGIC):
        return zip_file.read_within(source, room)
    if raw.startswith(LEGACY_MAGIC):
        return pickle_files.read_legacy_within(source, room)
    if raw.startswith(NUMPY_MAGIC):
        return broken("npy", "it is not read here")
    if is_safetensors(".pt", raw[:9]):
        structure = safetensors.read(source, "")
        if not structure.problems:
            return structure
    marked = is_marked_pickle(raw)
    text = raw.rstrip(b"\0") if marked else raw  # a tensor of bytes may be padded
    if not text.endswith(b".") or (not marked and len(raw) > _LARGEST_UNMARKED):
        return None
    if room.budget <= 0:
        return broken("pickle", "it is more than ckptguard reads")
    structure = pickle_files.read_within(InMemory(text), room)
    return structure if marked or not structure.problems else None


def _of_dtype(storage: TensorPlace, dtype: str) -> TensorPlace:
    size = DTYPES[dtype].size if dtype in DTYPES else 1
    return structs.replace(storage, dtype=dtype, start=storage.start // size, stop=storage.stop // size)


def _sums_are_right(inner: Structure, raw: bytes) -> bool:
    crc32 = crc32_function()
    return all(s.crc32 is None or crc32(raw[s.offset : s.offset + s.length], 0) == s.crc32 for s in inner.spans)


def _take_tensors(found: Found, name: str, inner: Structure, raw: bytes, room: ReadingBudget) -> set[str]:
    """Record one number that is not finite of each tensor with some. Returns the names of tensors that hold files."""
    seen, opened = set(), set()
    for tensor in inner.tensors:
        place = (tensor.span, tensor.start, tensor.stop, tensor.dtype)
        if tensor.span is None or place in seen:
            continue
        seen.add(place)
        full, known = below(name, tensor.name), DTYPES.get(tensor.dtype)
        if known is None or room.budget <= 0:
            _not_read(found, full)
            continue
        begin, size = inner.spans[tensor.span].offset, known.size
        part = raw[begin + tensor.start * size : begin + tensor.stop * size]
        room.budget -= len(part)
        if tensor.dtype in SIZES:
            bad = bad_number(part, tensor.dtype, tensor.byte_order)
            if bad is not None and tensor.strides:
                _not_read(found, full)  # it may be an element that the tensor leaves out
            elif bad is not None:
                found.leaves.append(Leaf(full, bad, of_array=True))
        elif holds_bytes(tensor) and take_file(found, full, part, room):
            opened.add(tensor.name)
    return opened


def _not_read(found: Found, name: str) -> None:
    if len(found.unread) < MAX_UNREAD and name not in found.unread:
        found.unread.append(name)
