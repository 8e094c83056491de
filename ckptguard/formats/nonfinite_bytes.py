"""Is any float in these bytes not finite? Without numpy, for what no span of the file can show to the scan."""

from __future__ import annotations

import math
import struct
import sys
from array import array

_CODES = {"float64": "d", "complex128": "d", "float32": "f", "complex64": "f", "float16": "e", "bfloat16": "f"}
_F16_MARKS = bytes((b & 0x7C) == 0x7C for b in range(256))  # of a float16's high byte: not finite
_BF16_MARKS = bytes((b & 0x7F) == 0x7F for b in range(256))  # of a bfloat16's: perhaps

SIZES = {"float64": 8, "complex128": 16, "float32": 4, "complex64": 8, "float16": 2, "bfloat16": 2}


def bad_number(raw: bytes | bytearray, dtype: str, byte_order: str) -> float | None:
    """One element that is not finite, if there is one; `raw` holds whole elements of a dtype of `SIZES`."""
    if dtype in ("float16", "bfloat16"):
        high = raw[1::2] if byte_order == "little" else raw[0::2]
        if b"\1" not in high.translate(_F16_MARKS if dtype == "float16" else _BF16_MARKS):
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
