"""Zip archives, and plain bytes, that are nearly right."""

from __future__ import annotations

import functools
import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import NamedTuple

_INTERESTING = (0, 1, 2, 3, 7, 8, 9, 16, 255, 256, 4096, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**40)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """A bit, a byte, a number, or a slice of it changed."""
    if not data:
        return rng.randbytes(rng.randrange(20))
    at = rng.randrange(len(data))
    what = rng.randrange(8)
    if what < 3:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if what == 3:
        return data[:at] + rng.randbytes(1) + data[at + 1 :]
    if what == 4:
        word = rng.choice((struct.pack("<I", rng.choice(_INTERESTING) & 0xFFFFFFFF), bytes.fromhex("0000c07f")))
        return data[:at] + word + data[at + 4 :]
    stop = min(len(data), at + rng.randrange(1, 40))
    if what == 5:
        return data[:at] + data[stop:]
    if what == 6:
        return data[:stop] + data[at:]
    return data[:at] if rng.random() < 0.5 else data + rng.randbytes(rng.randrange(1, 9))


class Entry(NamedTuple):
    """A record of a zip archive; what its headers say beside what is true, as changes to (local, central)."""

    name: bytes
    data: bytes
    method: int = 0
    lies: tuple[tuple[int, str, int], ...] = ()  # (0 local, 1 central or 2 both; field; value)
    extra: bytes = b""
    raw: bytes | None = None  # what is stored, if not what `method` makes of the data
    gap: bytes = b""


class Archive(NamedTuple):
    entries: tuple[Entry, ...]
    end: tuple[tuple[str, int], ...] = ()
    comment: bytes = b""


def zip_of(archive: Archive) -> bytes:
    """The bytes of an archive."""
    out, directory = bytearray(), bytearray()
    for entry in archive.entries:
        stored = entry.raw
        if stored is None:
            stored = zlib.compress(entry.data, 6, -15) if entry.method == 8 else entry.data
        fields = {
            "version": 20,
            "flags": 0,
            "method": entry.method,
            "time": 0,
            "crc": zlib.crc32(entry.data),
            "stored": len(stored),
            "size": len(entry.data),
            "offset": len(out) + len(entry.gap),
            "disk": 0,
        }
        local, central = dict(fields), dict(fields)
        for where, field, value in entry.lies:
            for number, header in enumerate((local, central)):
                if where in (number, 2):
                    header[field] = value
        out += entry.gap
        out += (
            b"PK\3\4"
            + _header(local)
            + struct.pack("<HH", len(entry.name), len(entry.extra))
            + entry.name
            + entry.extra
        )
        out += stored
        directory += b"PK\1\2\x14\0" + _header(central) + struct.pack("<HH", len(entry.name), len(entry.extra))
        directory += (
            struct.pack("<HHHII", 0, central["disk"], 0, 0, central["offset"] & 0xFFFFFFFF) + entry.name + entry.extra
        )
    count = len(archive.entries)
    end = {"disk": 0, "on": count, "count": count, "length": len(directory), "offset": len(out)} | dict(archive.end)
    tail = struct.pack("<HHHHII", 0, end["disk"], end["on"], end["count"], end["length"], end["offset"])
    tail = struct.pack("<HH", end["disk"], 0) + struct.pack(
        "<HHII", end["on"], end["count"], end["length"], end["offset"]
    )
    return bytes(out + directory + b"PK\5\6" + tail + struct.pack("<H", len(archive.comment)) + archive.comment)


def _header(f: dict[str, int]) -> bytes:
    small = struct.pack("<HHHHH", *(f[n] & 0xFFFF for n in ("version", "flags", "method", "time")), 33)
    return small + struct.pack("<III", *(f[n] & 0xFFFFFFFF for n in ("crc", "stored", "size")))


@functools.lru_cache(64)
def archive_of(data: bytes) -> Archive:
    """The records of a whole archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        return Archive(tuple(Entry(i.filename.encode(), old.read(i), i.compress_type) for i in old.infolist()))


def mutate_zip(data: bytes, rng: random.Random, inner: Callable[[str, bytes, random.Random], bytes]) -> bytes:
    """An archive with a record changed: mostly what it holds, else how it is stored, or the directory."""
    archive = archive_of(data)
    entries = list(archive.entries)
    at = rng.randrange(len(entries))
    if rng.random() < 0.6:
        pickles = [i for i, e in enumerate(entries) if e.name.endswith(b"data.pkl")]
        at = rng.choice(pickles) if pickles and rng.random() < 0.8 else at
        entry = entries[at]
        entries[at] = entry._replace(data=inner(entry.name.decode("latin-1"), entry.data, rng))
        return zip_of(archive._replace(entries=tuple(entries)))
    entry, other = entries[at], rng.choice(entries)
    root = entry.name.partition(b"/")[0]
    what = rng.randrange(14)
    if what == 0:
        names = (
            other.name,
            entry.name.upper(),
            entry.name + b"/",
            b"./" + entry.name,
            b"x/" + entry.name.partition(b"/")[2],
        )
        names += (
            entry.name.replace(b"/", b"\\"),
            entry.name.replace(b"/", b"//"),
            b"/" + entry.name,
            b"",
            entry.name[:-1],
        )
        names += (
            root + b"/constants.pkl",
            root + b"/code/a.py",
            root + b"/data/0",
            root + b"/data/7",
            root + b"/byteorder",
        )
        names += (
            entry.name + b"\0x",
            root + b"/data.pkl",
            root + b"/.data/serialization_id",
            "archïve/data.pkl".encode(),
        )
        entries[at] = entry._replace(name=rng.choice(names))
    elif what == 1:
        del entries[at]
    elif what == 2:
        entries.insert(rng.randrange(len(entries) + 1), entry._replace(data=rng.choice((entry.data, other.data, b""))))
    elif what == 3:
        rng.shuffle(entries)
    elif what == 4:
        entries[at] = entry._replace(method=rng.choice((0, 1, 8, 8, 8, 9, 12, 14, 93, 99)))
    elif what == 5:
        raw = zlib.compress(entry.data, rng.randrange(10), -15)
        raw = rng.choice((raw[:-1], raw + b"\0", raw + raw, mutate_bytes(raw, rng), entry.data))
        entries[at] = entry._replace(method=8, raw=raw)
    elif what == 6:
        lie = (rng.randrange(3), "flags", rng.choice((1, 2, 4, 8, 0x20, 0x40, 0x800, 0x2000, 0x808)))
        entries[at] = entry._replace(lies=(*entry.lies, lie))
    elif what in (7, 8):
        field = rng.choice(("stored", "size", "crc", "method", "offset", "version", "disk"))
        size = len(entry.data)
        value = rng.choice((0, 1, size - 1, size + 1, size + 64, 0xFFFFFFFF, 8, 65535, zlib.crc32(other.data)))
        entries[at] = entry._replace(lies=(*entry.lies, (rng.randrange(3), field, value)))
    elif what == 9:
        zip64 = struct.pack("<HHQQ", 1, 16, len(entry.data), len(entry.data) + rng.choice((0, 1)))
        padding = b"FB" + struct.pack("<H", 5) + b"ZZZZZ"
        unicode = struct.pack("<HHBI", 0x7075, 5 + len(other.name), 1, zlib.crc32(entry.name)) + other.name
        extra = rng.choice((zip64, padding, unicode, b"\1\0", b"FB\xff\xff", padding + zip64))
        lies = ((2, "stored", 0xFFFFFFFF), (2, "size", 0xFFFFFFFF)) if rng.random() < 0.5 else ()
        entries[at] = entry._replace(extra=extra, lies=(*entry.lies, *lies))
    elif what == 10:
        return zip_of(archive._replace(comment=rng.choice((b"x", b"PK\5\6" + bytes(18), bytes(300)))))
    elif what == 11:
        fields = ("disk", "on", "count", "length", "offset")
        end = (rng.choice(fields), rng.choice((0, 1, len(entries) - 1, len(entries) + 1, 65535, 46)))
        return zip_of(archive._replace(end=(end,)))
    elif what == 12:
        entries[at] = entry._replace(gap=rng.choice((b"\0", b"junk", zip_of(Archive((other,))), data[:50])))
    else:
        return rng.choice((b"\0" * rng.randrange(1, 9) + data, data + data, data + zip_of(Archive((entry,)))))
    return zip_of(archive._replace(entries=tuple(entries)))
