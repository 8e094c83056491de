"""Checkpoints that are nearly right: mutations that know the structure of what they change.

A mutant is made of the files of a real checkpoint, by name, and of a seeded random source.
"""

from __future__ import annotations

import functools
import json
import pickletools
import random
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

from support.mutant_pickles import mutate_pickle, pickle_end

Files = dict[str, bytes]
_INTERESTING = (0, 1, 2, 3, 7, 8, 9, 16, 255, 256, 4096, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**40)


def mutated(kind: str, files: Files, rng: random.Random) -> Files:
    """One mutant of a checkpoint: usually one change, sometimes up to four."""
    changed = dict(files)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4))):
        names = sorted(changed)
        name = rng.choice(names)
        if len(names) > 1 and rng.random() < 0.1:
            other = rng.choice(names)
            changed[name], changed[other] = changed[other], changed[name]
        elif rng.random() < 0.15:
            changed[name] = mutate_bytes(changed[name], rng)
        else:
            try:
                changed[name] = _MUTATIONS[kind](name, changed[name], rng)
            except Exception:  # an earlier change left nothing of its structure
                changed[name] = mutate_bytes(changed[name], rng)
    return changed


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
    import io
    import zipfile

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


def _torch_record(name: str, data: bytes, rng: random.Random) -> bytes:
    if name.endswith(".pkl"):
        return mutate_pickle(data, rng)
    if name.endswith(("byteorder", "version")) and rng.random() < 0.8:
        return rng.choice(
            (b"big", b"little", b"", b"big\n", b"LITTLE", b"3\n", b"1\n", b"4", b"-1", b"x", b"99999999999")
        )
    return mutate_bytes(data, rng)


def _torch_zip(name: str, data: bytes, rng: random.Random) -> bytes:
    return mutate_zip(data, rng, _torch_record)


def _legacy(name: str, data: bytes, rng: random.Random) -> bytes:
    """One of the five pickles, or what follows them."""
    places = [0]
    for _ in range(5):
        places.append(pickle_end(data, places[-1]))
    which = rng.choice((0, 1, 2, 3, 3, 3, 3, 3, 4, 4, 5))
    if which == 5:
        return data[: places[5]] + mutate_bytes(data[places[5] :], rng)
    start, stop = places[which : which + 2]
    return data[:start] + mutate_pickle(data[start:stop], rng) + data[stop:]


_DTYPE_WORDS = (
    "F64",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "I64",
    "I32",
    "U8",
    "BOOL",
    "C64",
    "F4",
    "f32",
    "",
    "U16",
)


def _safetensors(name: str, data: bytes, rng: random.Random) -> bytes:
    if name.endswith(".json"):
        return _json_text(data, rng)
    length = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.1:
        return struct.pack("<Q", max(0, length + rng.choice((-8, -1, 1, 8, 2**40)))) + header + body
    if rng.random() < 0.3:
        header = _json_text(header, rng)
    else:
        pairs = list(json.loads(header).items())
        at = rng.randrange(len(pairs))
        key, value = pairs[at]
        other = rng.choice(pairs)
        what = rng.randrange(9)
        if what == 0 and "dtype" in value:
            pairs[at] = key, value | {"dtype": rng.choice(_DTYPE_WORDS)}
        elif what == 1 and "shape" in value:
            pairs[at] = key, value | {"shape": _sizes(value["shape"], rng)}
        elif what == 2 and "data_offsets" in value:
            pairs[at] = key, value | {"data_offsets": _sizes(value["data_offsets"], rng)}
        elif what == 3:
            pairs[at] = rng.choice((other[0], key + "x", "", "__metadata__", key + "\0", "é")), value
        elif what == 4:
            pairs[at] = key, other[1]
        elif what == 5:
            pairs.insert(
                rng.randrange(len(pairs) + 1), rng.choice(((key, value), (key, other[1]), ("__metadata__", {"a": "b"})))
            )
        elif what == 6:
            del pairs[at]
        elif what == 7:
            pairs[at] = (
                key,
                value | {rng.choice(("x", "dtype", "shape")): rng.choice((None, [], "F32", {}, [2, 3], 1.0))},
            )
        else:
            rng.shuffle(pairs)
        text = ",".join(f"{json.dumps(k)}:{json.dumps(v)}" for k, v in pairs)
        header = f"{{{text}}}".encode()
        header += b" " * rng.choice((0, -len(header) % 8))
    return struct.pack("<Q", len(header)) + header + body


def _sizes(numbers: list[int], rng: random.Random) -> list[object]:
    changed: list[object] = list(numbers)
    at = rng.randrange(len(changed) + 1)
    if at == len(changed) or rng.random() < 0.2:
        changed.insert(at, rng.choice((0, 1, 1, 2)))
    elif rng.random() < 0.2:
        del changed[at]
    elif rng.random() < 0.3:
        changed.reverse()
    else:
        old = numbers[at]
        changed[at] = rng.choice(
            (0, 1, old - 1, old + 1, old * 2, -old, 2**31, 2**32, 2**63, 2**64, float(old), True, None, str(old))
        )
    return changed


def _json_text(text: bytes, rng: random.Random) -> bytes:
    """JSON with a token replaced, repeated, or removed."""
    marks = b'{}[],:" '
    parts: list[bytes] = []
    word = b""
    for byte in text:
        if byte in marks:
            parts += [word] if word else []
            parts.append(bytes([byte]))
            word = b""
        else:
            word += bytes([byte])
    parts += [word] if word else []
    if not parts:
        return mutate_bytes(text, rng)
    at = rng.randrange(len(parts))
    choices: tuple[list[bytes], ...] = ([], [parts[at]] * 2, [rng.choice(parts)], [b"\\u0041", parts[at]])
    choices += (
        [
            rng.choice(
                (b"1e2", b"-0", b"null", b"NaN", b"0", b"1", b"01", b"18446744073709551616", b"\n", b"\xff", b"/**/")
            )
        ],
    )
    return b"".join((*parts[:at], *rng.choice(choices), *parts[at + 1 :]))


_DESCRS = (
    "<f4",
    ">f4",
    "<f8",
    "<f2",
    "|u1",
    "<i8",
    "<c8",
    "|b1",
    "|O",
    "=f4",
    "<U2",
    "|S4",
    "<M8[s]",
    "f4",
    "<f3",
    "|V4",
    "<f16",
)


def _npy(name: str, data: bytes, rng: random.Random) -> bytes:
    length = struct.unpack("<H", data[8:10])[0]
    head, text, body = data[:8], data[10 : 10 + length].rstrip(), data[10 + length :]
    if body[:1] == b"\x80" and rng.random() < 0.5:
        return data[: 10 + length] + mutate_pickle(body, rng)
    what = rng.randrange(8)
    if what == 0:
        fields = eval(text, {})
        fields["descr"] = rng.choice((*_DESCRS, [("a", "<f4"), ("b", rng.choice(_DESCRS))], [("a", "<f4", (2,))]))
        text = repr(fields).encode()
    elif what == 1:
        fields = eval(text, {})
        fields["shape"] = tuple(_sizes(list(fields["shape"]), rng))
        text = repr(fields).encode()
    elif what == 2:
        text = text.replace(b"False", rng.choice((b"True", b"0", b"1", b"None", b"'x'")))
    elif what == 3:
        text = rng.choice(
            (
                text + b" #",
                text[:-1] + b"'x': 1}",
                text.replace(b", }", b"}"),
                text.replace(b"'", b'"'),
                text.replace(b"L", b""),
            )
        )
    elif what == 4:
        head = head[:6] + rng.choice((b"\2\0", b"\3\0", b"\0\0", b"\1\1", b"\4\0"))
    elif what == 5:
        text = mutate_bytes(text, rng)
    elif what == 6:
        body = mutate_bytes(body, rng)
    else:
        return mutate_bytes(data[:80], rng) + data[80:]
    if rng.random() < 0.7:
        text += b" " * ((-len(text) - 11) % 64) + b"\n"
    size = (
        struct.pack("<I", len(text))
        if head[6:7] in (b"\2", b"\3") and rng.random() < 0.8
        else struct.pack("<H", len(text) & 0xFFFF)
    )
    return head + size + text + body


def _npz(name: str, data: bytes, rng: random.Random) -> bytes:
    return mutate_zip(data, rng, lambda inner, text, r: _npy(inner, text, r))


def _dcp(name: str, data: bytes, rng: random.Random) -> bytes:
    if name.endswith(".metadata"):
        return mutate_pickle(data, rng)
    start = rng.choice([n for n in range(len(data)) if data.startswith(b"PK\3\4", n)] or [0])
    return data[:start] + mutate_bytes(data[start:], rng)


_MUTATIONS: dict[str, Callable[[str, bytes, random.Random], bytes]] = {
    "torch_zip": _torch_zip,
    "torch_legacy": _legacy,
    "pickle": lambda name, data, rng: mutate_pickle(data, rng),
    "safetensors": _safetensors,
    "npy": _npy,
    "npz": _npz,
    "dcp": _dcp,
    "sharded": _safetensors,
}
KINDS = tuple(_MUTATIONS)
__all__ = ["KINDS", "Files", "mutate_bytes", "mutated", "pickletools"]
