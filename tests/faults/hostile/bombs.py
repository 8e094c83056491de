"""Small files, or files that claim much, that would cost a careless reader its memory or its patience."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from faults.hostile.assembly import text
from support.container_files import tar_of
from support.format_files import torch_archive, torch_bytes

from ckptguard.formats.table import LEGACY_MAGICS

MIB = 1 << 20


_LOCAL = [("magic", "<u4"), ("zeros", "V22"), ("length", "<u2"), ("extra", "<u2"), ("name", "S7"), ("number", "7u1")]
_CENTRAL = [
    *(("magic", "<u4"), ("zeros", "V24"), ("length", "<u2"), ("more", "V12"), ("offset", "<u4")),
    *(("name", "S7"), ("number", "7u1")),
]


def _zip_of(count: int) -> bytes:
    """An archive of so many empty records, made by hand because writers are slow."""
    digits = np.arange(count)[:, None] // 10 ** np.arange(6, -1, -1) % 10 + ord("0")
    local, central = np.zeros(count, _LOCAL), np.zeros(count, _CENTRAL)
    for records, magic in ((local, 0x04034B50), (central, 0x02014B50)):
        records["magic"], records["length"], records["name"], records["number"] = magic, 14, b"a/data/", digits
    central["offset"] = np.arange(count) * local.itemsize
    start, size = local.nbytes, central.nbytes
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 0, 0, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    few = min(count, 0xFFFF)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, few, few, size, start, 0)
    return local.tobytes() + central.tobytes() + end64 + locator + end


def _overlapping(count: int, size: int) -> bytes:
    """Many names for one record, so that unpacking all of them would take `count` times its size."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(bytes(size)) + packer.flush()
    crc = zlib.crc32(bytes(size))
    name = b"a/data.pkl"
    local = (
        struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 8, 0, 0, crc, len(packed), size, len(name), 0) + name + packed
    )
    central = b""
    for number in range(count):
        name = b"a/data/%d" % number
        central += (
            struct.pack(
                "<IHHHHHHIIIHHHHHII",
                0x02014B50,
                20,
                20,
                0,
                8,
                0,
                0,
                crc,
                len(packed),
                size,
                len(name),
                0,
                0,
                0,
                0,
                0,
                0,
            )
            + name
        )
    return local + central + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, len(central), len(local), 0)


def _deflated(name: str, *contents: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, content in enumerate(contents):
            archive.writestr(name.format(number), content)
    return target.getvalue()


def _tensors(entries: str, body: int = 0) -> bytes:
    raw = entries.encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(body)


def _one(*, dtype: str = "F32", shape: str = "[]", offsets: str = "[0,4]") -> bytes:
    return _tensors(f'{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}', 4)


def _pickled_array(size: int) -> bytes:
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    head += b" " * (63 - (10 + len(head)) % 64) + b"\n"
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head
    return start + b"\x80\x04\x8e" + struct.pack("<Q", size) + bytes(size) + b"."


_LAUGHS = (
    b"\x80\x02](K\x01e"
    + b"".join(b"q\x00](h\x00h\x00h\x00h\x00h\x00h\x00h\x00h\x00h\x00h\x00e" for _ in range(200))
    + b"."
)


def _gguf(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, keys) + rest


_TEXT_KEYS = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 40) + bytes(16 * MIB)
_NESTED_KEYS = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 1_000_000

BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "deflated weights in a zip": ("m_5.zip", lambda: _deflated("w{}.pth", *[bytes(60 * MIB)] * 6)),
    "overlapping files in a zip": ("m_5.zip", lambda: _overlapping(20_000, 4 * MIB).replace(b"a/data", b"a.ckpt")),
    "a million files in a zip": ("m.zip", lambda: _zip_of(1_000_000)),
    "a thousand pickles in a zip": ("m_5.zip", lambda: _deflated("w{}.pkl", *[_LAUGHS] * 1500)),
    "compressed tar of zeros": ("m.nemo", lambda: gzip.compress(bytes(200 * MIB), 1)),
    "tar of many files": ("m.nemo", lambda: tar_of([(f"{n}.ckpt", b"x") for n in range(25_000)])),
    "GGUF of 2**63 tensors": ("m.gguf", lambda: _gguf(2**63, 0, bytes(1000))),
    "GGUF of a million tensors": ("m.gguf", lambda: _gguf(10**6, 0, bytes(32 * MIB))),
    "GGUF of many texts": ("m.gguf", lambda: _gguf(0, 1, _TEXT_KEYS)),
    "GGUF of nested lists": ("m.gguf", lambda: _gguf(0, 1, _NESTED_KEYS)),
    "a hundred thousand records": ("m.pt", lambda: _zip_of(100_000)),
    "a million records": ("m.pt", lambda: _zip_of(1_000_000)),
    "a million records of numpy": ("m.npz", lambda: _zip_of(1_000_000)),
    "records that end early": ("m.pt", lambda: _zip_of(60_000)[:-1000]),
    "overlapping records": ("m.pt", lambda: _overlapping(20_000, 4 * MIB)),
    "overlapping arrays": ("m.npz", lambda: _overlapping(20_000, 4 * MIB)),
    "deflated data.pkl": ("m.pt", lambda: _deflated("a/data.pkl", bytes(64 * MIB))),
    "deflated arrays": ("m.npz", lambda: _deflated("arr_{}.npy", *[bytes(64 * MIB)] * 8)),
    "deflated objects": ("m.npz", lambda: _deflated("arr_{}.npy", _pickled_array(256 * MIB))),
    "billion laughs": ("m.pkl", lambda: _LAUGHS),
    "billion laughs in an archive": ("m.pt", lambda: torch_archive(_LAUGHS)),
    "doubling tuples": ("m.pkl", lambda: b"\x80\x02K\x01" + b"2\x86" * 100_000 + b"."),
    "deep lists": ("m.pkl", lambda: b"]" * MIB + b"a" * (MIB - 1) + b"."),
    "deep marks": ("m.pkl", lambda: b"(" * (4 * MIB) + b"."),
    "deep keys": ("m.pkl", lambda: b"\x80\x02})" + b"\x85" * MIB + b"K\x01s."),
    "one key again and again": (
        "m.pkl",
        lambda: b"(" + b"K\x01" * 9000 + b"tq\x000}" + b"h\x00K\x01s" * 500_000 + b".",
    ),
    "one argument again and again": (
        "m.pkl",
        lambda: b"c__builtin__\nset\nq\x000](" + b"K\x01" * 9000 + b"e\x85q\x010(" + b"h\x00h\x01R" * 100_000 + b"l.",
    ),
    "states on states": ("m.pkl", lambda: b"\x80\x02cos\nsystem\n)R" + b"K\x01b" * 500_000 + b"."),
    "lists only": ("m.pkl", lambda: b"(" + b"]" * (16 * MIB) + b"l."),
    "empty frames": ("m.pkl", lambda: b"\x80\x04" + (b"\x95" + bytes(8)) * 500_000 + b"N."),
    "memo far away": ("m.pkl", lambda: b"\x80\x02" + b"Nr\xff\xff\xff\xff0" * 200_000 + b"N."),
    "bytes of 2 GiB": ("m.pkl", lambda: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 31) + b"x."),
    "text of 2**63 bytes": ("m.pkl", lambda: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b"x."),
    "integer of 1 GiB": ("m.pkl", lambda: b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"x."),
    "long decimal": ("m.pkl", lambda: b"L" + b"9" * MIB + b"L\n."),
    "many decimals": ("m.pkl", lambda: b"(" + (b"L" + b"9" * 999 + b"L\n") * 20_000 + b"l."),
    "wide texts": ("m.pkl", lambda: b"(" + text("\U0001f600" + "a" * MIB) * 20 + b"l."),
    "many globals": ("m.pkl", lambda: b"(" + b"".join(b"cm%d\nn\n" % i for i in range(500_000)) + b"l."),
    "many pickles": ("m.pkl", lambda: b"N." * 200_000),
    "many not-a-numbers": ("m.pkl", lambda: b"(" + (b"G\x7f\xf8" + bytes(6)) * 500_000 + b"l."),
    "memo of a metadata": (".metadata", lambda: b"\x80\x04(" + (b"]\x94j\x00\x00\x00\x00") * 500_000 + b"l."),
    "sizes of a metadata": (".metadata", lambda: b"\x80\x04(" + b"ctorch\nSize\n(K\x01K\x02t\x85R" * 200_000 + b"l."),
    "header of 2**63 bytes": ("m.safetensors", lambda: struct.pack("<Q", 1 << 63) + b"{}"),
    "header of 2**64-1 bytes": ("m.safetensors", lambda: b"\xff" * 8 + b"{}"),
    "header of spaces": ("m.safetensors", lambda: _tensors("{}" + " " * (95 * MIB))),
    "header too long": ("m.safetensors", lambda: _tensors('{"a":1' + " " * 100_000_000 + "}")),
    "deep header": ("m.safetensors", lambda: _tensors('{"a":' * 200_000 + "1" + "}" * 200_000)),
    "deep lists in a header": ("m.safetensors", lambda: _tensors('{"a":' + "[" * MIB + "]" * MIB + "}")),
    "duplicates in a header": ("m.safetensors", lambda: _tensors("{" + ",".join(['"a":1'] * 1_000_000) + "}")),
    "tensors without sense": ("m.safetensors", lambda: _tensors(json.dumps({f"t{i}": {} for i in range(500_000)}))),
    "shape beyond everything": (
        "m.safetensors",
        lambda: _one(shape="[" + ",".join(["9223372036854775807"] * 64) + "]", offsets="[0,0]"),
    ),
    "long shape": (
        "m.safetensors",
        lambda: _one(shape="[" + ",".join(["1"] * 4_000_000) + "]"),
    ),
    "negative": ("m.safetensors", lambda: _one(shape="[-1]", offsets="[0,-4]")),
    "floats for integers": ("m.safetensors", lambda: _one(shape="[1.0]")),
    "NaN for a size": ("m.safetensors", lambda: _one(shape="[NaN]")),
    "1e999 for a size": ("m.safetensors", lambda: _one(shape="[1e999]")),
    "integer of a million digits": ("m.safetensors", lambda: _tensors('{"a":' + "9" * MIB + "}")),
    "unknown dtype": ("m.safetensors", lambda: _one(dtype="F" * MIB)),
    "escapes in names": (
        "m.safetensors",
        lambda: _tensors('{"\\u001b[2J\\u202e\\u0000":{"dtype":"X","shape":[],"data_offsets":[0,4]}}', 4),
    ),
    "index without end": ("model.safetensors.index.json", lambda: b'{"weight_map":' + b'{"a":' * 300_000),
    "array of fields": ("m.npy", lambda: _array("[" + ",".join(f"('f{i}','<f4')" for i in range(5000)) + "]", "(1,)")),
    "array of everything": ("m.npy", lambda: _array("'<f4'", "(" + "9223372036854775807," * 60 + ")")),
    "deep array": ("m.npy", lambda: _array("[('a'," * 1000 + "'<f4'" + ")]" * 1000, "(1,)")),
    "header of an array": ("m.npy", lambda: b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"(" * MIB),
}  # fmt: skip


def _array(descr: str, shape: str) -> bytes:
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(head)) + head + bytes(4)


# Odd, but nothing is wrong with them: these may be good.
# Nobody can tell what these are without reading more of them than the limits allow: neither bad nor good.
UNDECIDED = (
    *("overlapping files in a zip", "compressed tar of zeros", "a million files in a zip", "a million records"),
    *("a million records of numpy", "deflated objects", "doubling tuples", "deep lists", "deep keys", "lists only"),
    "many pickles",
)
HARMLESS = ("empty frames", "many decimals", "wide texts")

# Files of holes: what they claim to hold is not there, and reading all of it into memory would be a mistake.
SPARSE: dict[str, tuple[str, bytes, int]] = {
    "pickle of holes": ("m.pkl", b"\x80\x04\x8e" + struct.pack("<Q", 500 * MIB), 500 * MIB + 100),
    "text of holes": ("m.pkl", b"\x80\x04\x8d" + struct.pack("<Q", 500 * MIB), 500 * MIB + 100),
    "pickle of 600 MiB": ("m.pkl", b"\x80\x04\x8e" + struct.pack("<Q", 500 * MIB), 600 * MIB),
    "metadata of holes": (".metadata", b"\x80\x04\x8e" + struct.pack("<Q", 200 * MIB), 250 * MIB),
    "index of holes": ("model.safetensors.index.json", b'{"weight_map":"', 60 * MIB),
    "trainer_state of holes": ("trainer_state.json", b'{"a":"', 250 * MIB),
    "archive of holes": ("m.pt", b"PK\x03\x04", 600 * MIB),
    "legacy file of holes": ("m.pth", LEGACY_MAGICS[0] + b"\x8e" + struct.pack("<Q", 1 << 29), 600 * MIB),
    "objects of holes": ("m.npy", _pickled_array(0)[:-1].replace(bytes(8), struct.pack("<Q", 400 * MIB)), 500 * MIB),
}  # fmt: skip

TOO_LARGE = ("objects of holes",)  # to be read at all


def write_sparse(path: Path, start: bytes, size: int) -> Path:
    """A file that begins so, and is holes up to its size."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
    return path


def benign_bomb() -> bytes:
    """Large and many, but honest."""
    import torch

    return torch_bytes({f"layer.{i}.w": torch.ones(4) for i in range(3000)})
