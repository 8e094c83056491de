"""Write a torch archive anew with fewer records, as torch itself would have written these.

Each record keeps its bytes, its checksum and the form of its header. Its data is aligned for memory maps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from ckptguard.formats.structure import Source
from ckptguard.formats.zip.crc import crc32_function
from ckptguard.formats.zip.directory import HAS_DESCRIPTOR, ZIP64, DirectoryEntry

Part = bytes | tuple[int, int]  # new bytes, or offset and length of bytes to copy

_PADDING = 0x4246  # torch's kind of extra field
_LOCAL, _ENTRY = 30, 46  # bytes of the headers before the name
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF


def with_records(
    reader: Source,
    entries: Iterable[DirectoryEntry],
    offsets: Mapping[str, int],
    anew: Mapping[str, bytes],
    alignment: int,
) -> list[Part]:
    """Return an archive of these records, in their order. `offsets` says where the data of each is now, and `anew` the
    content of those that change, by name."""
    parts: list[Part] = []
    directory, end, count = bytearray(), 0, 0
    for entry in entries:
        new = anew.get(entry.name)
        size, crc = (entry.packed, entry.crc32) if new is None else (len(new), crc32_function()(new, 0))
        full = entry.size if new is None else len(new)
        large, far = max(size, full) >= _FULL32, end >= _FULL32
        sizes = (struct.pack("<QQ", full, size) if large else b"") + (struct.pack("<Q", end) if far else b"")
        zip64 = struct.pack("<HH", ZIP64, len(sizes)) + sizes if sizes else b""
        short = (_FULL32, _FULL32) if large else (size, full)
        header = bytearray(reader.read(entry.header_offset, _LOCAL))
        described = bool(entry.flags & HAS_DESCRIPTOR)
        if not described or any(header[14:26]):
            struct.pack_into("<III", header, 14, crc, *short)
        begin = end + _LOCAL + len(entry.raw_name) + len(zip64) + 4
        padding = b"Z" * (-begin % alignment)
        extra = zip64 + struct.pack("<HH", _PADDING, len(padding)) + padding
        struct.pack_into("<HH", header, 26, len(entry.raw_name), len(extra))
        form = "<4sIQQ" if zip64 else "<4sIII"
        after = struct.pack(form, b"PK\x07\x08", crc, size, full) if described else b""
        listed = bytearray(reader.read(entry.place, _ENTRY))
        struct.pack_into("<III", listed, 16, crc, *short)
        struct.pack_into("<HH", listed, 28, len(entry.raw_name), len(zip64))
        struct.pack_into("<I", listed, 42, _FULL32 if far else end)
        directory += listed + entry.raw_name + zip64
        parts += [bytes(header) + entry.raw_name + extra, (offsets[entry.name], size) if new is None else new, after]
        end, count = begin + len(padding) + size + len(after), count + 1
    return [*parts, bytes(directory) + _end_of(end, len(directory), count)]


def _end_of(begin: int, size: int, count: int) -> bytes:
    """Return the records that end an archive whose directory begins here."""
    last = struct.pack(
        "<4sHHHHIIH",
        b"PK\x05\x06",
        0,
        0,
        min(count, _FULL16),
        min(count, _FULL16),
        min(size, _FULL32),
        min(begin, _FULL32),
        0,
    )
    if count < _FULL16 and max(begin, size) < _FULL32:
        return last
    zip64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, begin)
    return zip64 + struct.pack("<4sIQI", b"PK\x06\x07", 0, begin + size, 1) + last
