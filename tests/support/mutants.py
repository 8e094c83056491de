"""Checkpoints that are nearly right: mutations that know the structure of what they change.

A mutant is made of the files of a real checkpoint, by name, and of a seeded random source.
"""

from __future__ import annotations

import functools
import io
import json
import pickletools
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import NamedTuple

_NAN, _INF = b"G\x7f\xf8\0\0\0\0\0\0", b"G\xff\xf0\0\0\0\0\0\0"
_INTS = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    12,
    16,
    24,
    32,
    64,
    255,
    256,
    -1,
    -2,
    65535,
    2**31 - 1,
    -(2**31),
    2**31,
    2**40,
    2**62,
    2**63,
    2**64,
)
_TEXTS = (
    "storage",
    "cpu",
    "cuda:0",
    "meta",
    "0",
    "1",
    "2",
    "7",
    "",
    "a.b",
    "weight",
    "requires_grad",
    "_metadata",
    "data",
    "é",
)
_TEXTS += (
    "_local_tensor",
    "__class__",
    "latin1",
    "utf-8",
    "module",
    "_backward_hooks",
    "grad",
    "step",
    "model",
    "__dict__",
)
_DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "uint8",
    "bool",
    "complex64",
    "float8_e4m3fn",
    "qint8",
    "float99",
    "bits8",
)
_STORAGES = (
    "Float",
    "Double",
    "Half",
    "BFloat16",
    "Long",
    "Byte",
    "Bool",
    "ComplexFloat",
    "Untyped",
    "Typed",
    "Foo",
    "QInt8",
    "Int",
)
_KINDS = (
    "Tensor",
    "FloatTensor",
    "HalfTensor",
    "LongTensor",
    "Size",
    "device",
    "strided",
    "per_tensor_affine",
    "sparse_coo",
    "dtype",
)
_KINDS += ("Generator", "FooTensor", "BFloat16Tensor", "DoubleTensor", "contiguous_format", "long", "ByteTensor")
_REBUILDS = ("", "_v2", "_v3")
GLOBALS = (
    *(f"torch {name}" for name in (*_DTYPES, *_KINDS)),
    *(f"torch {name}Storage" for name in _STORAGES),
    *(f"torch.storage {name}Storage" for name in ("Untyped", "Typed", "Float", "_Legacy")),
    *(f"torch._utils _rebuild_tensor{suffix}" for suffix in _REBUILDS),
    *(
        "torch._utils _rebuild_parameter",
        "torch._utils _rebuild_parameter_with_state",
        "torch._utils _rebuild_sparse_tensor",
    ),
    *(
        "torch._utils _rebuild_qtensor",
        "torch._utils _rebuild_meta_tensor_no_storage",
        "torch._utils _rebuild_nested_tensor",
    ),
    *(
        "torch._utils _rebuild_wrapper_subclass",
        "torch._utils _rebuild_device_tensor_from_numpy",
        "torch._utils _rebuild_nothing",
    ),
    *(
        "torch._utils _rebuild_device_tensor_from_cpu_tensor",
        "torch._tensor _rebuild_from_type_v2",
        "torch.serialization _get_layout",
    ),
    *("torch.nn.parameter Parameter", "torch.nn.parameter Buffer", "torch.nn.parameter UninitializedParameter"),
    *(
        "collections OrderedDict",
        "collections Counter",
        "collections defaultdict",
        "collections deque",
        "types SimpleNamespace",
    ),
    *("argparse Namespace", "builtins dict", "builtins list", "builtins set", "builtins frozenset", "builtins tuple"),
    *(
        "builtins int",
        "builtins float",
        "builtins complex",
        "builtins bytes",
        "builtins bytearray",
        "builtins str",
        "builtins bool",
    ),
    *(
        "builtins slice",
        "builtins range",
        "builtins object",
        "_codecs encode",
        "copyreg _reconstructor",
        "__builtin__ set",
    ),
    *("__builtin__ float", "__builtin__ long", "numpy ndarray", "numpy dtype", "numpy._core.multiarray _reconstruct"),
    *("numpy.core.multiarray _reconstruct", "numpy._core.multiarray scalar", "numpy._core.numeric _frombuffer"),
    *(
        "numpy.dtypes Float32DType",
        "datetime datetime",
        "datetime timedelta",
        "pathlib PosixPath",
        "uuid UUID",
        "typing Any",
    ),
    *("torch.jit._pickle build_intlist", "torch.jit._pickle build_doublelist", "torch.jit._pickle restore_type_tag"),
    *("torch.distributed.checkpoint.metadata Metadata", "torch.distributed.checkpoint.metadata TensorStorageMetadata"),
    *(
        "torch.distributed.checkpoint.metadata ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata MetadataIndex",
    ),
    *(
        "torch.distributed.checkpoint.metadata BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata TensorProperties",
    ),
    *(
        "torch.distributed.checkpoint.filesystem _StorageInfo",
        "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING",
    ),
)
_ALONE = b"()]}t0Nd12ales.uobR\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x81Q"


def pickle_end(data: bytes, start: int = 0) -> int:
    """Where the pickle that begins there ends."""
    return start + [at for _, _, at in pickletools.genops(data[start:])][-1] + 1


@functools.lru_cache(256)
def opcodes(data: bytes) -> tuple[bytes, ...]:
    """The opcodes of a pickle with their arguments; frames are left out, for what is in them changes."""
    found = [(op.name, at) for op, _, at in pickletools.genops(data)]
    places = [at for _, at in found] + [found[-1][1] + 1]
    return tuple(data[at : places[n + 1]] for n, (name, at) in enumerate(found) if name != "FRAME")


def mutate_pickle(data: bytes, rng: random.Random) -> bytes:
    """The pickle with one change."""
    ops = list(opcodes(data))
    last = len(ops) - 1  # STOP
    at = rng.randrange(max(last, 1))
    what = rng.randrange(14)
    if what == 0:
        del ops[at]
    elif what == 1:
        ops.insert(at, ops[at])
    elif what == 2:
        other = rng.randrange(max(last, 1))
        ops[at], ops[other] = ops[other], ops[at]
    elif what == 3 and at + 1 < last:
        ops[at], ops[at + 1] = ops[at + 1], ops[at]
    elif what in (4, 5, 6):
        ops[at] = changed(ops[at], ops, rng)
    elif what == 7:
        ops[at] = value(rng, ops, 2)
    elif what == 8:
        ops.insert(at, value(rng, ops, 2))
    elif what == 9:
        stop = min(last, at + rng.randrange(1, 12))
        ops[at:stop] = rng.choice(([], ops[at:stop] * 2, [value(rng, ops, 2)]))
    else:
        after = b"Rb\x81" if rng.random() < 0.5 else b"Rbs}])u\x81teQ"
        where = [n + 1 for n, op in enumerate(ops[:last]) if op[:1] in after] if rng.random() < 0.9 else []
        ops.insert(rng.choice(where or [at]), action(rng, ops))
    return b"".join(ops)


def changed(op: bytes, ops: list[bytes], rng: random.Random) -> bytes:
    """The opcode with another argument."""
    code = op[:1]
    if code in b"KMJ\x8aI\x88\x89":
        return integer(rng.choice(_INTS)) if rng.random() < 0.8 else value(rng, ops, 1)
    if code == b"G":
        return rng.choice((_NAN, _INF, b"G" + rng.randbytes(8), integer(1), b"N"))
    if code in b"XU\x8cVST":
        return rng.choice(
            (text(rng.choice(_TEXTS)), rng.choice([o for o in ops if o[:1] == code]), text(op[-3:].decode("latin-1")))
        )
    if code == b"c":
        known = [o for o in ops if o[:1] == b"c"]
        return rng.choice(known) if rng.random() < 0.3 else named(rng)
    if code in b"qh":
        return code + bytes([rng.choice((op[1], max(op[1], 1) - 1, min(op[1] + 1, 255), rng.randrange(60)))])
    if code == b"\x80":
        return b"\x80" + bytes([rng.randrange(7)])
    return bytes([rng.choice(_ALONE)]) if len(op) == 1 else op[:-1] + rng.randbytes(1)


def integer(number: int) -> bytes:
    """The shortest opcode for it."""
    if 0 <= number < 256:
        return b"K" + bytes([number])
    if 0 <= number < 65536:
        return b"M" + struct.pack("<H", number)
    if -(2**31) <= number < 2**31:
        return b"J" + struct.pack("<i", number)
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def text(words: str) -> bytes:
    """A text."""
    raw = words.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def named(rng: random.Random) -> bytes:
    """A name that is allowed, or nearly."""
    return b"c" + rng.choice(GLOBALS).replace(" ", "\n").encode() + b"\n"


def value(rng: random.Random, ops: list[bytes], depth: int) -> bytes:
    """Opcodes that push one value."""
    what = rng.randrange(18 if depth else 9)
    if what < 2:
        return rng.choice((_NAN, _NAN, _INF, b"G\x3f\xf0\0\0\0\0\0\0", b"Fnan\n", b"I1\n", b"L1L\n", b"F1_0\n"))
    if what == 2:
        return integer(rng.choice(_INTS))
    if what == 3:
        return text(rng.choice(_TEXTS))
    if what == 4:
        return rng.choice((b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"C\2ab", b"S'a'\n", b"Va\n"))
    if what in (5, 6):
        kept = [b"h" + op[1:] for op in ops if op[:1] == b"q"]
        return rng.choice(kept or [b"N"])
    if what == 7:
        return named(rng)
    if what == 8:
        return rng.choice((b"", b"0", b"2", b"1"))
    several = b"".join(value(rng, ops, depth - 1) for _ in range(rng.randrange(4)))
    if what == 9:
        return b"(" + several + b"t"
    if what == 10:
        return b"](" + several + b"e"
    if what == 11:
        return b"}(" + several + b"u"
    if what == 12:
        return rng.choice(
            (b"\x8f(" + several + b"\x90", b"(" + several + b"\x91", b"(" + several + b"l", b"(" + several + b"d")
        )
    if what == 13:
        return b"](" + rng.choice((_NAN, _INF, b"K\1")) * rng.randrange(1, 4) + b"e"
    made = named(rng) + b"(" + several + b"t" + rng.choice((b"R", b"R", b"R", b"\x81"))
    if what == 14:
        made = named(rng) + rng.choice((b")R", b")\x81", b"](" + _NAN * 2 + b"e\x85R"))
    if what == 15:
        made += action(rng, ops, depth - 1)
    return made


def action(rng: random.Random, ops: list[bytes], depth: int = 2) -> bytes:
    """Opcodes that do something to what lies on top of the stack, and leave it there."""
    one = value(rng, ops, max(depth - 1, 0))
    key = rng.choice((text(rng.choice(_TEXTS)), integer(rng.randrange(3)), one))
    return rng.choice(
        (
            key + one + b"s",
            b"(" + key + one + b"u",
            integer(0) + _NAN + b"s",
            text("a") + _NAN + b"s",
            one + b"a",
            _NAN + b"a",
            b"(" + one + one + b"e",
            one + b"b",
            b"}" + key + one + b"sb",
            b"}" + text("a") + _NAN + b"sb",
            b"N}" + text("a") + one + b"s\x86b",
            b"(" + one + b"\x90",
            one + b"R",
            b")R",
            b"\x85" + one + b"0",
            one + b"0",
            b"q\5",
            b"\x94",
            b"2",
            one + b"0q\7",
            b"2\x86",
            b"]q\x30" + b"h\x30h\x30\x86a" * rng.choice((1, 30)) + b"0",
        )
    )


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
