"""``.distcp`` of torch.distributed.checkpoint: a row of torch archives, one per tensor piece or object.

Only the ``.metadata`` beside it says where each one is and what it is. Tensor names are those of the state dict, with
the piece's place: ``model.w[0:4, 8:16]``.

There may be a hundred thousand small archives of a dozen shapes, which differ only in their tensors' bytes. Only the
first of each shape is read in full.
"""

from __future__ import annotations

import math
import re
import struct
from typing import NamedTuple

import msgspec
from msgspec import structs

from ckptguard.formats.dcp import switch
from ckptguard.formats.dcp.chunks import chunk_name
from ckptguard.formats.pickle.machine import BUDGET
from ckptguard.formats.structure import Beside, ChunkPlace, Found, Problem, SpanPlace, Structure, TensorPlace, broken
from ckptguard.formats.torch import files
from ckptguard.formats.torch.files import ReadingBudget
from ckptguard.formats.torch.state_tree import MAX_LEAVES, MAX_UNREAD, below
from ckptguard.formats.zip.crc import crc32_function
from ckptguard.formats.zip.directory import CRC_IN_ENTRY, CRC_IN_HEADER, HAS_DESCRIPTOR, find_tail, read_directory
from ckptguard.storage.protocol import Entry, Reader

NAME = "distcp"
_RANK = re.compile(r"__(\d{1,9})_\d+\.distcp")
_ROOM_EACH = 1 << 14  # of a pickle's budget: about five times the cost of a plain tensor's pickle
_WRAPPERS = ("torch._utils._rebuild_wrapper_subclass", "torch._tensor._rebuild_from_type_v2")
_KEY = 256  # bytes: nearly always they contain the pickle, which lists the tensors
_MOST = 1024  # kinds of archives, each with at most _LARGEST bytes beside tensors
_LARGEST = 1 << 14
_SERIAL_NAME = "/.data/serialization_id"  # follows from the tensors' bytes, and no reader uses it
_SERIAL = -1
_UNLISTED = "more numbers that are not finite than ckptguard lists"
_AHEAD = 1 << 18
_EDGE = 1 << 13


def read(reader: Reader, path: str, beside: Beside) -> Structure:
    """Return the tensors and numbers in the ranges that ``.metadata`` states for this file.

    A disagreement with ``.metadata`` is a problem that names the tensor. So are bytes after the last range, but not
    bytes between ranges.
    """
    name = path.rpartition("/")[2]
    rank = _RANK.fullmatch(name)
    metadata = beside(".metadata") or (beside(f"__{rank[1]}.metadata") if rank else None)
    if metadata is None:
        return Structure(format=NAME, truncated=True)  # it is written last, so the save is not finished
    chunks = metadata.chunks.get(name, ())
    if not chunks:
        if not reader.entry.size and not metadata.problems:
            return Structure(format=NAME)  # a rank or thread with nothing to write
        if metadata.not_understood:
            return Structure(format=NAME, not_understood=("what it holds, which a .metadata says that was not read",))
        return broken(NAME, "the .metadata beside it does not list any content of this file")
    reading = _Reading(len(chunks))
    reading.take(reader, chunks)
    reading.found.containers = metadata.containers
    return reading.found.structure(NAME)


class _Reading:
    """What has been found so far, range by range."""

    def __init__(self, count: int) -> None:
        self.room = ReadingBudget(BUDGET + count * _ROOM_EACH)
        self.room.nodes += count * 100
        self.found = Found()

    def take(self, reader: Reader, chunks: tuple[ChunkPlace, ...]) -> None:
        windows, alike, size = Subranges(reader), IdenticalHeaders(self.room), reader.entry.size
        for chunk in chunks:
            name = chunk_name(chunk)
            if chunk.offset + chunk.length > size:
                self.found.truncated = True
                expected, message = str(chunks[-1].offset + chunks[-1].length), "the file ends before this tensor does"
                self.found.add(Problem(message, tensor=name, expected=expected, found=str(size)))
                return
            if chunk.packed:
                self.packed(chunk, name)
            else:
                self.blob(chunk, name, alike.read(windows.window(chunk.offset, chunk.length)))
        rest = size - chunks[-1].offset - chunks[-1].length
        if rest:
            self.found.add(Problem(f"{rest} bytes follow the last range that .metadata states"))

    def packed(self, chunk: ChunkPlace, name: str) -> None:
        """Note compressed bytes: only their digest can be known."""
        if chunk.dtype:
            self.found.tensors.append(TensorPlace(name, f"packed {chunk.dtype}", chunk.shape, len(self.found.spans)))
        self.found.spans.append(SpanPlace(chunk.offset, chunk.length))
        self.add_unread(name)

    def blob(self, chunk: ChunkPlace, name: str, blob: Structure) -> None:
        first = len(self.found.spans)
        self.found.spans += [SpanPlace(chunk.offset + s.offset, s.length, s.crc32) for s in blob.spans]
        for tensor in blob.tensors:
            span = None if tensor.span is None else first + tensor.span
            self.found.tensors.append(structs.replace(tensor, name=below(name, tensor.name), span=span))
        for problem in blob.problems:
            self.found.add(structs.replace(problem, tensor=name))
        for leaf in blob.leaves:
            if len(self.found.leaves) < (MAX_LEAVES // 2 if math.isfinite(leaf.value) else MAX_LEAVES):
                self.found.leaves.append(structs.replace(leaf, name=below(name, leaf.name)))
            elif not math.isfinite(leaf.value):
                self.found.add(Problem(_UNLISTED, tensor=name, doubt=True))
        self.found.names.update(blob.globals)
        for inner in blob.unread:
            self.add_unread(below(name, inner))
        self.found.not_understood += [f"{name}: {part}" for part in blob.not_understood]
        if chunk.dtype and not blob.problems and not blob.not_understood:
            self.compare(chunk, name, blob)

    def compare(self, chunk: ChunkPlace, name: str, blob: Structure) -> None:
        """Check that a tensor's piece is one tensor, with the type and shape in ``.metadata``."""
        if len(blob.tensors) == 1 and blob.tensors[0].name == "value":
            found = blob.tensors[0]
            if (found.dtype, found.shape) != (chunk.dtype, chunk.shape):
                message = "it differs from .metadata: one of the two files is old or foreign"
                expected, shown = (f"{kind.dtype} {list(kind.shape)}" for kind in (chunk, found))
                self.found.add(Problem(message, tensor=name, expected=expected, found=shown))
        elif not any(wrapper in blob.globals for wrapper in _WRAPPERS):  # one made of several tensors
            self.found.add(Problem("there is no tensor where .metadata states one", tensor=name))

    def add_unread(self, name: str) -> None:
        if len(self.found.unread) < MAX_UNREAD:
            self.found.unread.append(name)


class Subranges:
    """Hands out windows in file order. Small neighbours are read together."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.start = 0
        self.block = b""

    def window(self, offset: int, length: int) -> Subrange:
        """Return the range as a reader. It must be inside the file."""
        if length > _AHEAD:
            head = self.reader.read(offset, _EDGE)
            return Subrange(self.reader, offset, length, head, self.reader.read(offset + length - _EDGE, _EDGE))
        if not self.start <= offset <= offset + length <= self.start + len(self.block):
            self.start = offset
            self.block = self.reader.read(offset, min(_AHEAD, self.reader.entry.size - offset))
        begin = offset - self.start
        return Subrange(self.reader, offset, length, self.block[begin : begin + length], b"")


class Subrange(msgspec.Struct):
    """A `Source` of `length` bytes from `offset`. Its first and last bytes are already in memory."""

    reader: Reader
    offset: int
    length: int
    head: bytes
    tail: bytes

    @property
    def entry(self) -> Entry:
        """The file's entry with the window's size."""
        entry = self.reader.entry
        return Entry(key=entry.key, kind="file", size=self.length, mtime_ns=entry.mtime_ns)

    @property
    def whole(self) -> bytes | None:
        """All of its bytes, if they are in memory."""
        return self.head if len(self.head) == self.length else None

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of the window."""
        if offset + length <= len(self.head):
            return self.head[offset : offset + length]
        begin = offset + len(self.tail) - self.length
        if begin >= 0:
            return self.tail[begin : begin + length]
        return self.reader.read(self.offset + offset, length)


class _Kind(NamedTuple):
    """What archives of one kind have in common.

    `layout` splits an archive into `common` pieces and the varying ones between them. Of the latter, `sums` are the two
    places that state each span's CRC-32. `serial` is the same for the serialization id, after the id itself. `cost` and
    `nodes` are what reading one takes from the budget.
    """

    layout: struct.Struct
    common: tuple[bytes, ...]
    sums: tuple[tuple[int, ...], ...]
    serial: tuple[int, ...]
    structure: Structure
    cost: int
    nodes: int


class IdenticalHeaders:
    """Reads archives one after another, within one budget."""

    def __init__(self, room: ReadingBudget) -> None:
        self._room = room
        self._kinds: dict[tuple[int, bytes], _Kind] = {}
        self._crc32 = crc32_function()

    def read(self, window: Subrange) -> Structure:
        """Return the same as `files.read_zip_within`, in all cases."""
        raw = window.whole
        if raw is None or not switch.BY_HEART:
            return files.read_zip_within(window, self._room)
        key = (len(raw), raw[:_KEY])
        kind = self._kinds.get(key)
        if kind is not None:
            structure = self._like(kind, raw)
            if structure is not None:
                return structure
        budget, nodes = self._room.budget, self._room.nodes
        structure = files.read_zip_within(window, self._room)
        if not structure.problems and kind is None and len(self._kinds) < _MOST:
            kind = _kind_of(window, raw, structure, budget - self._room.budget, nodes - self._room.nodes)
            if kind is not None:
                self._kinds[key] = kind
        return structure

    def _like(self, kind: _Kind, raw: bytes) -> Structure | None:
        """Return the structure if it is one of this kind, whole and within the budget."""
        room = self._room
        pieces = kind.layout.unpack(raw)
        if pieces[::2] != kind.common or room.budget <= kind.cost or room.nodes <= kind.nodes:
            return None
        crcs = []
        for first, *others in kind.sums:
            crcs.append(int.from_bytes(pieces[first], "little"))
            if any(pieces[n] != pieces[first] for n in others):
                return None
        if kind.serial:
            serial, *stated = kind.serial
            crc = self._crc32(pieces[serial], 0).to_bytes(4, "little")
            if any(pieces[n] != crc for n in stated):
                return None
        room.budget -= kind.cost
        room.nodes -= kind.nodes
        structure = kind.structure
        spans = tuple(SpanPlace(s.offset, s.length, crc) for s, crc in zip(structure.spans, crcs, strict=True))
        return structs.replace(structure, spans=spans)


def _kind_of(window: Subrange, raw: bytes, structure: Structure, cost: int, nodes: int) -> _Kind | None:
    """Return the kind of an archive that was read without problems; None if too much of it is not tensors."""
    tail = find_tail(window)
    spans = {span.offset: number for number, span in enumerate(structure.spans)}
    holes: list[tuple[int, int, int]] = []  # begin, end, number of the span (_SERIAL: none)
    for entry in read_directory(window, tail, [], "torch"):
        crc = entry.header_offset + CRC_IN_HEADER
        names, extras = struct.unpack_from("<HH", raw, crc + 12)
        begin = crc + 16 + names + extras
        end = begin + entry.packed
        number = spans.get(begin, _SERIAL) if entry.packed else _SERIAL
        if number == _SERIAL and not entry.name.endswith(_SERIAL_NAME):
            continue
        holes += [(begin, end, number), (entry.place + CRC_IN_ENTRY, entry.place + CRC_IN_ENTRY + 4, number)]
        if entry.flags & HAS_DESCRIPTOR:
            holes.append((end + 4, end + 8, number))
        if not entry.flags & HAS_DESCRIPTOR or any(raw[crc : crc + 4]):
            holes.append((crc, crc + 4, number))
    layout, position = "<", 0
    places: dict[int, list[int]] = {number: [] for number in (*range(len(spans)), _SERIAL)}
    for index, (begin, end, number) in enumerate(sorted(holes)):
        elements = number != _SERIAL and begin == structure.spans[number].offset
        layout += f"{begin - position}s" + (f"{end - begin}x0s" if elements else f"{end - begin}s")
        position = end
        if not elements:
            places[number].append(2 * index + 1)
    shape = struct.Struct(f"{layout}{len(raw) - position}s")
    common = shape.unpack(raw)[::2]
    if sum(map(len, common)) > _LARGEST:
        return None
    serial = places.pop(_SERIAL)
    return _Kind(shape, common, tuple(map(tuple, places.values())), tuple(serial), structure, cost, nodes)
