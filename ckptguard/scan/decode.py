"""Decode stored elements: every float type as float64, integers as they are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ckptguard.formats.dtypes import DTYPES, FloatLayout
from ckptguard.scan.arrays import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Raw = NDArray[np.uint8]
    Bits = NDArray[np.unsignedinteger]
    Values = NDArray[np.float64]

_NUMPY_FLOATS = {"float64": "f8", "float32": "f4", "float16": "f2"}
_NUMPY_FLOATS |= {"complex128": "f8", "complex64": "f4", "complex32": "f2"}
_INTEGERS = {f"{sign}int{8 * size}": f"{sign[:1] or 'i'}{size}" for sign in ("", "u") for size in (1, 2, 4, 8)}
_INTEGERS["bool"] = "u1"


class Decoder:
    """Reads elements of one dtype. `size` is that of an element, `components` its number of floats (1 for integers).
    `bits` is the type of an unsigned integer of one component.

    `is_float` and `is_integer` are both false for types whose bytes alone have no value (quantised ones).
    """

    def __init__(self, dtype: str, byte_order: str) -> None:
        known = DTYPES[dtype]
        order = ">" if byte_order == "big" else "<"
        self.dtype, self.byte_order = dtype, byte_order
        self.size, self.components = known.size, known.components
        self.is_float = known.float is not None
        self.is_integer = dtype in _INTEGERS
        self.bits = np.dtype(f"{order}u{known.size // known.components}")
        self._plain: np.dtype[Any] | None = None
        self._table: Values | None = None
        if dtype in _NUMPY_FLOATS:
            self._plain = np.dtype(order + _NUMPY_FLOATS[dtype])
        elif self.is_integer:
            self._plain = np.dtype(order + _INTEGERS[dtype])
        elif known.float is not None and known.float.size == 1:
            self._table = _table(known.float)

    def integers(self, raw: Raw) -> NDArray[Any]:
        """Return the elements of an integer type."""
        assert self._plain is not None
        return np.frombuffer(raw, self._plain)

    def values(self, raw: Raw) -> Values:
        """Return the elements of a float or integer type as float64; a complex one's components follow each other."""
        return self.values_of(np.frombuffer(raw, self.bits))

    def values_of(self, bits: Bits, out: Values | None = None) -> Values:
        """Return the same for elements that were read as the unsigned integers `bits`, in `out` if that is given."""
        out = np.empty(bits.shape) if out is None else out
        with np.errstate(all="ignore"):  # a signalling NaN is only another NaN
            if self._table is not None:
                self._table.take(bits, out=out, mode="clip")  # every byte is in the table
            elif self._plain is not None:
                out[...] = bits.view(self._plain)
            else:  # bfloat16
                wide = bits.astype(np.uint32)
                wide <<= np.uint32(16)
                out[...] = wide.view(np.float32)
        return out


def _table(layout: FloatLayout) -> Values:
    """Return all 256 values of a one-byte float type."""
    values = np.empty(256, np.float64)
    for bits in range(256):
        magnitude = bits & ~layout.sign
        negative = bits != magnitude
        if layout.negative_zero_is_nan and bits == layout.sign:
            value = math.nan
        elif magnitude >= layout.bad:
            value = math.inf if magnitude == layout.infinity else math.nan
        else:
            value = layout.magnitude(magnitude)
        values[bits] = -value if negative else value
    return values
