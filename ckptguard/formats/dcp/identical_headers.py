"""Small archives of torch that differ in nothing but their tensors' bytes, of which only the first is read in full.

A distributed checkpoint holds one for each piece of a tensor: a hundred thousand, of a dozen shapes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from msgspec import structs

from ckptguard.formats.dcp import switch
from ckptguard.formats.structure import SpanPlace, Structure
from ckptguard.formats.torch import zip_file
from ckptguard.formats.zip.crc import crc32_function
from ckptguard.formats.zip.directory import CRC_IN_ENTRY, CRC_IN_HEADER, HAS_DESCRIPTOR, find_tail, read_directory
from ckptguard.formats.zip.subrange import Subrange

_KEY = 256  # bytes: nearly always they hold the pickle, which says what tensors there are
_MOST = 1024  # kinds of archives, each of at most _LARGEST bytes beside tensors
_LARGEST = 1 << 14
_SERIAL_NAME = "/.data/serialization_id"  # follows from the tensors' bytes, and nobody looks at it
_SERIAL = -1


class _Kind(NamedTuple):
    """What archives of one kind have in common.

    `layout` takes an archive apart into `common` pieces and, between them, those that differ. Of these, `sums` are
    where the CRC-32 of each span is stated, once and again; `serial` is likewise for the serialization id, after the
    id itself. `cost` and `nodes` are what reading one takes of the room.
    """

    layout: struct.Struct
    common: tuple[bytes, ...]
    sums: tuple[tuple[int, ...], ...]
    serial: tuple[int, ...]
    structure: Structure
    cost: int
    nodes: int


class IdenticalHeaders:
    """Reads archives one after the other, within one room."""

    def __init__(self, room: zip_file.ReadingBudget) -> None:
        self._room = room
        self._kinds: dict[tuple[int, bytes], _Kind] = {}
        self._crc32 = crc32_function()

    def read(self, window: Subrange) -> Structure:
        """What `torch_zip.read_within` finds in the archive, in all cases."""
        raw = window.whole
        if raw is None or not switch.BY_HEART:
            return zip_file.read_within(window, self._room)
        key = (len(raw), raw[:_KEY])
        kind = self._kinds.get(key)
        if kind is not None:
            structure = self._like(kind, raw)
            if structure is not None:
                return structure
        budget, nodes = self._room.budget, self._room.nodes
        structure = zip_file.read_within(window, self._room)
        if not structure.problems and kind is None and len(self._kinds) < _MOST:
            kind = _kind_of(window, raw, structure, budget - self._room.budget, nodes - self._room.nodes)
            if kind is not None:
                self._kinds[key] = kind
        return structure

    def _like(self, kind: _Kind, raw: bytes) -> Structure | None:
        """The structure if it is one of this kind, whole and within the room."""
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
    """The kind of an archive that was read without any problem; None where too much of it is no tensor."""
    tail = find_tail(window)
    spans = {span.offset: number for number, span in enumerate(structure.spans)}
    holes: list[tuple[int, int, int]] = []  # begin, end, number of the span (_SERIAL: none)
    for entry in read_directory(window, tail, [], of_numpy=False):
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
