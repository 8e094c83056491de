"""Strict reading of zip archives, in the one way that every reader agrees with.

Usual readers disagree about duplicates, bytes before and after the archive, and local headers that contradict the
directory. Here each of these is a problem. Nothing is unpacked.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from ckptguard.formats.strict_json import printable
from ckptguard.formats.structure import Problem, Source, shortened
from ckptguard.formats.zip.crc import crc32_function, crc32_of
from ckptguard.formats.zip.directory import (
    DEFLATED,
    HAS_DESCRIPTOR,
    ZIP64,
    DirectoryEntry,
    Kind,
    Tail,
    extra_fields,
    find_tail,
    read_directory,
)

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_LOCAL_SIGNATURE = 0x04034B50
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_READ_AHEAD = 160  # a local header with torch's padding, nearly always
_MAX_PROBLEMS = 100
_LARGEST_DEFLATED = 64 << 20
_BLOCK, _NEAR = 1 << 16, 1 << 12
_UNPACKED = 1 << 20


class Record(NamedTuple):
    """One record: where its `packed` bytes are, and their size and CRC-32 after unpacking."""

    name: str
    offset: int
    size: int
    crc32: int
    packed: int
    deflated: bool


class UnpackProblem(ValueError):
    """The record differs from the archive's statement; the message says how."""


class Archive(NamedTuple):
    """`records` by name within the one root folder, if any. They are in bounds and do not overlap.

    `unreadable`: the names of those that are packed or written in a way that is not read here. `too_large`: why it was
    not read, though nothing is wrong with it.
    """

    root: str
    records: dict[str, Record]
    problems: tuple[Problem, ...]
    truncated: bool
    unreadable: frozenset[str] = frozenset()
    too_large: str = ""


def read_archive(reader: Source, kind: Kind = "torch") -> Archive:
    """Return the archive's records. Everything wrong is in the problems, and such records are left out.

    torch's archives have one root folder, and compress only code. Others have no root and may be deflated.
    """
    tail = find_tail(reader)
    if tail.problem is not None:
        return Archive("", {}, (Problem(tail.problem),), tail.truncated)
    if tail.too_large:
        return Archive("", {}, (), False, too_large=tail.too_large)
    problems: list[Problem] = []
    entries = read_directory(reader, tail, problems, kind)
    root = _one_root(entries, problems) if kind == "torch" else ""
    records = _place_records(reader, tail, entries, problems)
    if kind != "torch":
        seen: set[str] = set()
        for entry in entries:
            if entry.name in seen:
                problems.append(_wrong(entry.name, "is there twice"))
            seen.add(entry.name)
        unreadable = frozenset(entry.name for entry in entries if entry.unreadable)
        inside = {r.name: r for r in records if r.name not in unreadable}
    else:
        unreadable = frozenset()
        inside = {r.name[len(root) + 1 :]: r for r in records if r.name.startswith(root + "/")}
    reported = shortened(problems, _MAX_PROBLEMS, "problems of the archive")
    return Archive(root, inside, reported, False, unreadable)


def _wrong(name: str, what: str) -> Problem:
    return Problem(f"record {printable(name)!r} {what}")


def _one_root(entries: list[DirectoryEntry], problems: list[Problem]) -> str:
    """Return the root folder of the first record. All records should be in it, each under its own name."""
    root = entries[0].name.partition("/")[0] if entries else ""
    seen: dict[str, str] = {}
    for entry in entries:
        first, slash, rest = entry.name.partition("/")
        if not slash or not rest or first != root:
            problems.append(_wrong(entry.name, "lies outside the root folder"))
        folded = entry.name.casefold()
        if folded in seen:
            same = seen[folded] == entry.name
            problems.append(_wrong(entry.name, "is there twice" if same else "differs from another only by case"))
        seen[folded] = entry.name
    return root


def _place_records(reader: Source, tail: Tail, entries: list[DirectoryEntry], problems: list[Problem]) -> list[Record]:
    """Return records in file order, checked to fill the file from its first byte to the directory without a gap."""
    records: dict[str, Record] = {}
    ahead = _ReadAhead(reader, tail.directory_offset)
    end, descriptor = 0, b""  # where the previous record's data ends, and the descriptor that should follow
    for entry in sorted(entries, key=lambda e: e.header_offset):
        start = entry.header_offset
        if not end <= start < tail.directory_offset:
            problems.append(_wrong(entry.name, "overlaps another" if start < end else "is out of bounds"))
            continue
        gap = start - end
        wanted = len(entry.raw_name) + _READ_AHEAD
        if gap == len(descriptor):
            raw = ahead.read(end, gap + wanted)
        if gap != len(descriptor) or not raw.startswith(descriptor):
            _note_gap(end, start, descriptor, problems)
            raw = ahead.read(start, wanted)
        else:
            raw = raw[gap:]
        placed = _read_local(reader, tail, entry, raw)
        if isinstance(placed, str):
            problems.append(Problem(f"record {printable(entry.name)!r}: {placed}"))
            # The end of its data is unknown, so the next record cannot be compared with it.
            end, descriptor = start, b""
            continue
        offset, descriptor = placed
        end = offset + entry.packed
        record = Record(entry.name, offset, entry.size, entry.crc32, entry.packed, entry.method == DEFLATED)
        records.setdefault(entry.name, record)
    whole = end + len(descriptor) == tail.directory_offset
    if not whole or reader.read(end, len(descriptor)) != descriptor:
        _note_gap(end, tail.directory_offset, descriptor, problems)
    return list(records.values())


def unpacked(reader: Source, record: Record) -> Iterator[bytes]:
    """Yield the record's content piece by piece, in bounded memory, never more than `record.size` bytes.

    After the last piece, size and CRC-32 are known to be as stated; otherwise UnpackProblem is raised.
    """
    crc32 = crc32_function()
    check = size = 0
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    position, end = record.offset, record.offset + record.packed
    waiting = b""
    while not stream.eof:
        if not waiting and position < end:
            waiting = reader.read(position, min(_BLOCK, end - position))
            position += len(waiting)
        try:
            block = stream.decompress(waiting, _UNPACKED)
        except zlib.error as error:
            raise UnpackProblem("its compressed bytes are damaged") from error
        waiting = stream.unconsumed_tail
        size += len(block)
        if size > record.size:
            raise UnpackProblem("it unpacks to more than the archive states")
        check = crc32(block, check)
        if block:
            yield block
        elif not waiting and position == end and not stream.eof:
            raise UnpackProblem("its compressed bytes end early")
    if stream.unused_data or waiting or position != end:
        raise UnpackProblem("bytes follow its compressed bytes")
    if size != record.size:
        raise UnpackProblem("it unpacks to less than the archive states")
    if check != record.crc32:
        raise UnpackProblem(f"it has CRC-32 {check:08x}, but the archive states {record.crc32:08x}")


def wrong_sum(reader: Source, record: Record, name: str, tensor: str | None = None) -> tuple[Problem, ...]:
    """Return a problem if the record's bytes have another CRC-32 than the archive states."""
    found = _inflated_crc32(reader, record) if record.deflated else crc32_of(reader, record.offset, record.packed)
    if found is None:
        return (Problem(f"record {name!r} cannot be unpacked", tensor=tensor),)
    if found == record.crc32:
        return ()
    message = f"record {name!r} has a wrong CRC-32"
    return (Problem(message, tensor=tensor, expected=f"{record.crc32:08x}", found=f"{found:08x}"),)


def _inflated_crc32(reader: Source, record: Record) -> int | None:
    """Return the CRC-32 of the unpacked record; None if that differs from the archive's statement, or is too large."""
    if max(record.packed, record.size) > _LARGEST_DEFLATED:
        return None
    unpacking = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        text = unpacking.decompress(reader.read(record.offset, record.packed), record.size + 1)
    except zlib.error:
        return None
    whole = unpacking.eof and not unpacking.unused_data and len(text) == record.size
    return crc32_function()(text, 0) if whole else None


class _ReadAhead:
    """Reads small records together with those after them, up to `end`, where the directory begins."""

    def __init__(self, reader: Source, end: int) -> None:
        self._reader = reader
        self._end = end
        self._start = 0
        self._block = b""

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes, or those of them before the end."""
        begin, length = offset - self._start, min(length, self._end - offset)
        known = len(self._block) - begin
        if begin < 0 or known < length:
            # Small records seem to follow each other only if the last block reached near here.
            near = begin >= 0 and known > -_NEAR
            self._start, begin = offset, 0
            self._block = self._reader.read(offset, min(max(length, _BLOCK if near else 0), self._end - offset))
        return self._block[begin : begin + length]


def _note_gap(end: int, start: int, descriptor: bytes, problems: list[Problem]) -> None:
    if len(problems) <= _MAX_PROBLEMS:
        what = "the data descriptor differs from the directory" if descriptor else "bytes belong to no record"
        problems.append(Problem(f"between byte {end} and {start}: {what}"))


def _read_local(reader: Source, tail: Tail, entry: DirectoryEntry, raw: bytes) -> tuple[int, bytes] | str:
    """Return (offset of the data, data descriptor that must follow), or what is wrong with the local header."""
    if len(raw) < _LOCAL.size:
        return "its local header is out of bounds"
    signature, _, flags, method, _, _, crc, packed, size, name_length, extra_length = _LOCAL.unpack_from(raw)
    if signature != _LOCAL_SIGNATURE:
        return "there is no local header where the directory states it"
    begin = _LOCAL.size + name_length
    whole = begin + extra_length
    if whole > len(raw):
        if entry.header_offset + whole > tail.directory_offset:
            return "its local header is out of bounds"
        raw = reader.read(entry.header_offset, whole)
    if raw[_LOCAL.size : begin] != entry.raw_name:
        return "its local header has another name than the directory"
    if flags != entry.flags or method != entry.method:
        return "its local header has other flags than the directory"
    fields = extra_fields(raw[begin:whole])
    if fields is None:
        return "its local header's extra fields are damaged"
    offset = entry.header_offset + whole
    if offset + entry.packed > tail.directory_offset:
        return "its data is out of bounds"
    if flags & HAS_DESCRIPTOR:
        # Sizes come after the data, so the header holds zeros or the same values.
        if crc not in (0, entry.crc32) or size not in (0, 0xFFFFFFFF, entry.size):
            return "its local header contradicts the directory"
        form = "<4sIQQ" if ZIP64 in fields else "<4sIII"
        return offset, struct.pack(form, _DESCRIPTOR_SIGNATURE, entry.crc32, entry.packed, entry.size)
    elsewhere = (0xFFFFFFFF,) if ZIP64 in fields else ()
    if crc != entry.crc32 or size not in (entry.size, *elsewhere) or packed not in (entry.packed, *elsewhere):
        return "its local header contradicts the directory"
    return offset, b""
