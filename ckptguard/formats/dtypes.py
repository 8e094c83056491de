"""Element types by torch's names: their size, and how to read a float's bits.

Only integer arithmetic on bits finds NaN and infinity exactly in every float type. So a float type is described by its
bit layout, not by a library's type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

FP16_LIMIT = 65504.0  # the largest finite IEEE 754 binary16 number


def is_countable(shape: Sequence[object], size: int = 1) -> bool:
    """True if this is a shape, and loaders can count its elements and their bytes. Zeros do not help.

    Some loaders multiply the sizes before a zero, some those after it.
    """
    sizes = [n for n in shape if type(n) is int and 0 <= n < 2**63]
    return len(sizes) == len(shape) and math.prod(filter(None, sizes)) * size < 2**63


class FloatLayout(msgspec.Struct, frozen=True):
    """How to read one float from its bits.

    Without the sign, bits order like magnitudes. Values from `bad` up are not finite. Of those, `infinity` is infinite
    (None: the type has no infinities), and all others are NaN. `negative_zero_is_nan`: the only NaN is the sign bit
    alone. `signed`: the highest bit is a sign; otherwise every bit is magnitude.
    """

    size: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    bad: int
    infinity: int | None
    negative_zero_is_nan: bool = False
    signed: bool = True

    @property
    def sign(self) -> int:
        """The sign bit; 0 if there is none."""
        return 1 << (8 * self.size - 1) if self.signed else 0

    def magnitude(self, bits: int) -> float:
        """Return the value of finite bits without sign."""
        if not self.mantissa_bits:
            return math.ldexp(1.0, bits - self.bias)  # a bare power of two; there is no zero
        exponent, mantissa = bits >> self.mantissa_bits, bits & ((1 << self.mantissa_bits) - 1)
        if exponent:
            return math.ldexp(mantissa + (1 << self.mantissa_bits), exponent - self.bias - self.mantissa_bits)
        return math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)


class Dtype(msgspec.Struct, frozen=True, kw_only=True):
    """One element type: `size` bytes, which are `components` floats of layout `float` (None: not a float type)."""

    name: str
    size: int
    float: FloatLayout | None = None
    components: int = 1


def _ieee(size: int, exponent_bits: int) -> FloatLayout:
    mantissa_bits = 8 * size - 1 - exponent_bits
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    bias = (1 << (exponent_bits - 1)) - 1
    return FloatLayout(size, exponent_bits, mantissa_bits, bias, bad=infinity, infinity=infinity)


_F64, _F32, _F16, _BF16 = _ieee(8, 11), _ieee(4, 8), _ieee(2, 5), _ieee(2, 8)

_FLOATS = {
    "float64": _F64,
    "float32": _F32,
    "float16": _F16,
    "bfloat16": _BF16,
    "float8_e5m2": _ieee(1, 5),
    "float8_e4m3fn": FloatLayout(1, 4, 3, bias=7, bad=0x7F, infinity=None),
    "float8_e4m3fnuz": FloatLayout(1, 4, 3, bias=8, bad=0x80, infinity=None, negative_zero_is_nan=True),
    "float8_e5m2fnuz": FloatLayout(1, 5, 2, bias=16, bad=0x80, infinity=None, negative_zero_is_nan=True),
    "float8_e8m0fnu": FloatLayout(1, 8, 0, bias=127, bad=0xFF, infinity=None, signed=False),
}
_COMPLEX = {"complex128": _F64, "complex64": _F32, "complex32": _F16}
_OTHERS = {
    **dict.fromkeys(("int64", "uint64"), 8),
    **dict.fromkeys(("int32", "uint32", "qint32"), 4),
    **dict.fromkeys(("int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "qint8", "quint8", "quint4x2", "quint2x4", "bits8", "bits1x8"), 1),
    **dict.fromkeys(("bits2x4", "bits4x2", "float4_e2m1fn_x2"), 1),
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}

DTYPES: dict[str, Dtype] = {
    **{name: Dtype(name=name, size=layout.size, float=layout) for name, layout in _FLOATS.items()},
    **{name: Dtype(name=name, size=2 * f.size, float=f, components=2) for name, f in _COMPLEX.items()},
    **{name: Dtype(name=name, size=size) for name, size in _OTHERS.items()},
}


class Blocks(msgspec.Struct, frozen=True):
    """A quantised type: blocks of `size` bytes for `elements` elements, scales of type `scale` at these offsets."""

    elements: int
    size: int
    offsets: tuple[int, ...]
    scale: str = "float16"

    def scales(self, raw: bytes) -> bytes:
        """Return the scales of whole blocks, one after the other."""
        width = DTYPES[self.scale].size
        found = bytearray(len(raw) // self.size * len(self.offsets) * width)
        for n, offset in enumerate(self.offsets):
            for byte in range(width):
                found[n * width + byte :: len(self.offsets) * width] = raw[offset + byte :: self.size]
        return bytes(found)


# Those of llama.cpp. Types whose scales are no floats in one place are left out.
BLOCKS: dict[str, Blocks] = {
    "q4_0": Blocks(32, 18, (0,)),
    "q4_1": Blocks(32, 20, (0, 2)),
    "q5_0": Blocks(32, 22, (0,)),
    "q5_1": Blocks(32, 24, (0, 2)),
    "q8_0": Blocks(32, 34, (0,)),
    "q2_k": Blocks(256, 84, (80, 82)),
    "q3_k": Blocks(256, 110, (108,)),
    "q4_k": Blocks(256, 144, (0, 2)),
    "q5_k": Blocks(256, 176, (0, 2)),
    "q6_k": Blocks(256, 210, (208,)),
    "iq2_xxs": Blocks(256, 66, (0,)),
    "iq2_xs": Blocks(256, 74, (0,)),
    "iq2_s": Blocks(256, 82, (0,)),
    "iq3_xxs": Blocks(256, 98, (0,)),
    "iq3_s": Blocks(256, 110, (0,)),
    "iq1_s": Blocks(256, 50, (0,)),
    "iq4_nl": Blocks(32, 18, (0,)),
    "iq4_xs": Blocks(256, 136, (0,)),
    "tq1_0": Blocks(256, 54, (52,)),
    "tq2_0": Blocks(256, 66, (64,)),
    "q1_0": Blocks(128, 18, (0,)),
    "mxfp4": Blocks(32, 17, (0,), "float8_e8m0fnu"),
}


def element_size(dtype: str) -> int:
    """Return the bytes of one element, or of one block of a quantised type."""
    return BLOCKS[dtype].size if dtype in BLOCKS else DTYPES[dtype].size


# The types whose floats are read: their own, or their scales.
WITH_FLOATS = BLOCKS.keys() | {name for name, dtype in DTYPES.items() if dtype.float is not None}


# How many elements share one stored byte, if torch's shapes count them individually.
ELEMENTS_PER_BYTE = {"quint4x2": 2, "quint2x4": 4}

# safetensors' words -> (our name, bits of one element). Types below one byte are opaque bytes to us.
SAFETENSORS_DTYPES: dict[str, tuple[str, int]] = {
    **{f"I{bits}": (f"int{bits}", bits) for bits in (64, 32, 16, 8)},
    **{f"U{bits}": (f"uint{bits}", bits) for bits in (64, 32, 16, 8)},
    **{f"F{bits}": (f"float{bits}", bits) for bits in (64, 32, 16)},
    **{f"F8_{kind}": (f"float8_{kind.lower()}", 8) for kind in ("E4M3FNUZ", "E5M2", "E5M2FNUZ")},
    **{name: (name, bits) for name, bits in (("F6_E2M3", 6), ("F6_E3M2", 6), ("F4", 4))},
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "BF16": ("bfloat16", 16),
    "BOOL": ("bool", 8),
    "C64": ("complex64", 64),
}

STORAGE_DTYPES: dict[str, str] = {
    **{f"{name}Storage": name.lower() for name in ("BFloat16", "Bool", "QInt8", "QInt32")},
    **{f"{name}Storage": name.lower() for name in ("QUInt8", "QUInt4x2", "QUInt2x4")},
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}
