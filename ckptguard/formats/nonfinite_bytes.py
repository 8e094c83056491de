"""Find a float that is not finite in bytes, without numpy, for floats that no span of the file shows to the scan."""

from __future__ import annotations

import functools
import math
import struct
import sys
from array import array

from ckptguard.formats.dtypes import DTYPES

_CODES = {"float64": "d", "complex128": "d", "float32": "f", "complex64": "f", "bfloat16": "f"}
_CODES |= {"float16": "e", "complex32": "e"}
_F16_MARKS = bytes((b & 0x7C) == 0x7C for b in range(256))  # of a float16's high byte: not finite
_BF16_MARKS = bytes((b & 0x7F) == 0x7F for b in range(256))  # of a bfloat16's: perhaps

SIZES = {name: dtype.size for name, dtype in DTYPES.items() if dtype.float is not None}


@functools.cache
def _byte_marks(dtype: str) -> bytes:
    """Return for each byte, as an element of a one-byte type, whether it is not finite."""
    layout = DTYPES[dtype].float
    assert layout is not None
    if layout.negative_zero_is_nan:
        return bytes(b == layout.sign for b in range(256))
    return bytes(b & ~layout.sign >= layout.bad for b in range(256))


def bad_number(raw: bytes | bytearray, dtype: str, byte_order: str) -> float | None:
    """Return one element that is not finite, or None. `raw` holds whole elements of a dtype of `SIZES`."""
    if SIZES[dtype] == 1:
        return math.nan if b"\1" in raw.translate(_byte_marks(dtype)) else None
    if dtype in ("float16", "bfloat16", "complex32"):
        high = raw[1::2] if byte_order == "little" else raw[0::2]
        if b"\1" not in high.translate(_BF16_MARKS if dtype == "bfloat16" else _F16_MARKS):
            return None
    if dtype == "bfloat16":
        low = raw[0::2] if byte_order == "little" else raw[1::2]
        raw = bytearray(2 * len(raw))
        raw[2::4], raw[3::4] = low, high
        byte_order = "little"
    code = _CODES[dtype]
    if code == "e":
        order = "<" if byte_order == "little" else ">"
        halves = struct.unpack(f"{order}{len(raw) // 2}e", raw)
        return next((n for n in halves if not math.isfinite(n)), None)
    values = array(code)
    values.frombytes(raw)
    if byte_order != sys.byteorder:
        values.byteswap()
    if math.isfinite(sum(values)):  # a finite sum has finite terms
        return None
    return next((n for n in values if not math.isfinite(n)), None)
