"""The end of a zip archive: end records, zip64 end records and the central directory, read strictly."""

from __future__ import annotations

import re
import stat
import struct
from typing import Literal, NamedTuple

from ckptguard.formats.strict_json import printable
from ckptguard.formats.structure import Problem, Source

MAX_ENTRIES = 500_000
MAX_DIRECTORY = 256 << 20

_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<IHHHHHHIIIHHHHHII")
_ENTRY_SIGNATURE = 0x02014B50
_UTF8 = 0x0800
_NEWEST_VERSION = 63  # the version that Python's own reader knows
STORED, DEFLATED = 0, 8
ZIP64 = 1  # of extra fields
HAS_DESCRIPTOR = 0x0008
CRC_IN_ENTRY, CRC_IN_HEADER = 16, 14  # its place in an entry of the directory, and in a local header
_KNOWN_FLAGS = 0x0808  # data descriptor, UTF-8 names
_LEVEL_FLAGS = 0x0006  # how hard a deflating writer tried
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
# What wrote an archive, and so what its readers accept: torch, numpy, or anybody who put files into it.
Kind = Literal["torch", "numpy", "files"]
_USUAL_NAME = re.compile(r"\w[\w-]*(?:\.[\w-]+)*(?:/\w[\w-]*(?:\.[\w-]+)*)*", re.ASCII)


class Tail(NamedTuple):
    """The content of the end records, or the `problem` with them."""

    directory_offset: int = 0
    directory_size: int = 0
    entries: int = 0
    problem: str | None = None
    truncated: bool = False
    too_large: str = ""  # why it is not read, though nothing is wrong with it


class DirectoryEntry(NamedTuple):
    """One record as the central directory states it. `packed` bytes of the file become `size` bytes."""

    name: str
    raw_name: bytes
    flags: int
    method: int
    crc32: int
    size: int
    packed: int
    header_offset: int
    place: int  # where the directory states this
    unreadable: bool = False  # it is packed or written in a way that is not read here


def find_tail(reader: Source) -> Tail:
    """Return the end records. They must be at the very end, directly after the directory."""
    size = reader.entry.size
    if size < _END.size:
        return Tail(problem="the file ends before the archive does", truncated=True)
    raw = reader.read(size - _END.size, _END.size)
    if raw[:4] != b"PK\x05\x06":
        return _without_end(reader, size)
    _, disk, first_disk, here, entries, length, offset, comment = _END.unpack(raw)
    if disk or first_disk or here != entries or comment:
        return Tail(problem="the archive's end record is invalid")
    end = size - _END.size
    if end >= _LOCATOR.size + _END64.size:
        locator = reader.read(end - _LOCATOR.size, _LOCATOR.size)
        if locator[:4] == b"PK\x06\x07":
            return _zip64_tail(reader, end - _LOCATOR.size, locator, (entries, length, offset))
    if entries == _FULL16 or _FULL32 in (length, offset):
        return Tail(problem="the archive's zip64 end record is missing")
    return _bounded(Tail(offset, length, entries), end)


def _zip64_tail(reader: Source, end: int, locator: bytes, short: tuple[int, int, int]) -> Tail:
    _, disk, offset64, disks = _LOCATOR.unpack(locator)
    start = end - _END64.size
    if disk or disks != 1 or offset64 != start:
        return Tail(problem="the archive's zip64 locator points elsewhere")
    raw = reader.read(start, _END64.size)
    signature, length64, _, _, disk, first_disk, here, entries, length, offset = _END64.unpack(raw)
    if signature != b"PK\x06\x06" or length64 != _END64.size - 12 or disk or first_disk or here != entries:
        return Tail(problem="the archive's zip64 end record is invalid")
    full = (_FULL16, _FULL32, _FULL32)
    if any(s not in (whole, f) for s, whole, f in zip(short, (entries, length, offset), full, strict=True)):
        return Tail(problem="the archive's two end records contradict each other")
    return _bounded(Tail(offset, length, entries), start)


def _bounded(tail: Tail, end: int) -> Tail:
    if tail.directory_offset + tail.directory_size != end:
        return Tail(problem="the archive's directory is not directly before its end record")
    if tail.entries > MAX_ENTRIES or tail.directory_size > MAX_DIRECTORY:
        return Tail(too_large=f"an archive of {tail.entries} records, more than ckptguard reads")
    if tail.entries == 0:
        return Tail(problem="the archive is empty")
    return tail


def _without_end(reader: Source, size: int) -> Tail:
    """Say why there is no end record at the end: bytes were appended, or the file is not complete."""
    length = min(size, _END.size + 65_536)
    block = reader.read(size - length, length)
    position = block.rfind(b"PK\x05\x06")
    if position >= 0 and position + _END.size <= length:
        *_, directory_size, offset, _ = _END.unpack_from(block, position)
        at = size - length + position
        # The directory, or the zip64 records after it, end exactly where this record begins.
        if offset + directory_size in (at, at - _END64.size - _LOCATOR.size) or offset == _FULL32:
            return Tail(problem=f"{length - position - _END.size} bytes follow the archive")
    return Tail(problem="the archive has no end record: the file is not complete", truncated=True)


def read_directory(reader: Source, tail: Tail, problems: list[Problem], kind: Kind) -> list[DirectoryEntry]:
    """Return the directory's valid entries; the others are problems.

    torch's records are stored, except code of torch.jit.save. numpy's names are keys of a dict, where only equal ones
    are wrong. In an archive of files a name may be that of a folder (``sub/``).
    """
    raw = reader.read(tail.directory_offset, tail.directory_size)
    entries: list[DirectoryEntry] = []
    position = 0
    while position < len(raw):
        if position + _ENTRY.size > len(raw):
            problems.append(Problem("the archive's directory ends in the middle of an entry"))
            return entries
        fields = _ENTRY.unpack_from(raw, position)
        name_length, extra_length, comment_length = fields[10:13]
        place, begin = position, position + _ENTRY.size
        position = begin + name_length + extra_length + comment_length
        if fields[0] != _ENTRY_SIGNATURE or position > len(raw):
            problems.append(Problem(f"entry {len(entries)} of the archive's directory is damaged"))
            return entries
        raw_name = raw[begin : begin + name_length]
        extra = raw[begin + name_length : begin + name_length + extra_length]
        entry = _entry(fields, raw_name, extra, tail.directory_offset + place, kind)
        if isinstance(entry, str):
            shown = printable(raw_name.decode("utf-8", "replace"))
            problems.append(Problem(f"record {shown!r}: {entry}"))
        else:
            entries.append(entry)
    if len(entries) != tail.entries and not problems:
        message = "the archive's directory has another number of records than its end record says"
        problems.append(Problem(message, expected=str(tail.entries), found=str(len(entries))))
    return entries


def _entry(fields: tuple[int, ...], raw_name: bytes, extra: bytes, place: int, kind: Kind) -> DirectoryEntry | str:
    """Return one entry, or why it is refused."""
    _, _, version, flags, method, _, _, crc, packed, size, _, _, comment, disk, _, attributes, offset = fields
    strange = None  # to us, and perhaps not to others
    if version & 0xFF > _NEWEST_VERSION:
        strange = f"it needs version {version & 0xFF} of the format"
    elif flags & ~(_KNOWN_FLAGS | (_LEVEL_FLAGS if kind == "files" else 0)):
        strange = f"flags 0x{flags:04x} are refused"
    elif method not in (STORED, DEFLATED) or (method == DEFLATED and kind == "torch" and b"/code/" not in raw_name):
        strange = "its compression is not supported"
    if strange is not None and kind != "files":
        return strange
    sizes = _with_zip64((size, packed, offset), extra)
    if sizes is None:
        return "its zip64 sizes are missing or damaged"
    size, packed, offset = sizes
    if (packed != size and method == STORED) or disk or comment:
        return "its sizes, disk or comment are invalid"
    folder = kind == "files" and raw_name.endswith(b"/") and not size
    if not folder and (stat.S_IFMT(attributes >> 16) not in (0, stat.S_IFREG) or attributes & 0x10):
        return "it is a link, a folder or something else that is not a file"
    try:
        name = raw_name.decode("utf-8")
    except UnicodeDecodeError:
        return "its name is not UTF-8"
    if not flags & _UTF8 and not name.isascii():
        return "its name is not ASCII, and not marked as UTF-8"
    plain = kind == "numpy" or _is_plain(name.removesuffix("/") if folder else name, kind)
    if not 0 < len(name) <= 4096 or "\0" in name or not plain:
        return "its name is unsafe"
    return DirectoryEntry(name, raw_name, flags, method, crc, size, packed, offset, place, strange is not None)


def _is_plain(name: str, kind: Kind) -> bool:
    if _USUAL_NAME.fullmatch(name):
        return True
    # torch: the first part is the stem of the file's name when it was written, which may be any name.
    stem, slash, inside = name.partition("/")
    name = inside if slash and stem and kind == "torch" else name
    return not any(c in name for c in "\n\r\\") and "://" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))


def extra_fields(extra: bytes) -> dict[int, bytes] | None:
    """Return the values of extra fields by their kinds; None if they are damaged."""
    fields, position = {}, 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        fields[kind] = extra[position + 4 : position + 4 + length]
        position += 4 + length
    return fields if position == len(extra) else None


def _with_zip64(stated: tuple[int, int, int], extra: bytes) -> tuple[int, int, int] | None:
    """Return size, packed size and offset, with the zip64 extra field's values for the full ones."""
    if not extra and _FULL32 not in stated:
        return stated
    fields = extra_fields(extra)
    if fields is None:
        return None
    values = fields.get(ZIP64, b"")
    result = []
    for value in stated:
        if value == _FULL32:
            if len(values) < 8:
                return None
            value, values = int.from_bytes(values[:8], "little"), values[8:]
        result.append(value)
    return None if values else (result[0], result[1], result[2])
