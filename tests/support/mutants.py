"""Checkpoints that are nearly right: mutations that know the structure of what they change.

A mutant is made of the files of a real checkpoint, by name, and of a seeded random source.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable

from support.mutant_archives import mutate_bytes, mutate_zip
from support.mutant_pickles import mutate_pickle, pickle_end

Files = dict[str, bytes]


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
