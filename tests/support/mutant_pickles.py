"""Pickles that are nearly right: opcodes deleted, repeated, exchanged, changed, and whole values and actions put in."""

from __future__ import annotations

import functools
import pickletools
import random
import struct

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
