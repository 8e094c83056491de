"""CRC-32 with the fastest installed library."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ckptguard.formats.structure import Source

_BLOCK = 1 << 20

Crc32 = Callable[[bytes | bytearray | memoryview, int], int]


@functools.cache
def crc32_function() -> Crc32:
    """Return `crc32(data, start_value)`: isal's (about 28 GB/s) if it is installed, else zlib's."""
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        from zlib import crc32
    function: Crc32 = crc32
    return function


def crc32_of(reader: Source, offset: int, length: int) -> int:
    """Return the CRC-32 of a range, in bounded memory."""
    crc32 = crc32_function()
    value = 0
    for begin in range(offset, offset + length, _BLOCK):
        value = crc32(reader.read(begin, min(_BLOCK, offset + length - begin)), value)
    return value


def crc32_of_rest(whole: int, first: int, rest: int) -> int:
    """Return the CRC-32 of the last `rest` bytes, from that of the whole and that of the part before."""
    return whole ^ _product(_power_of_x(8 * rest), first)


_POLYNOMIAL = 0xEDB88320


def _product(a: int, b: int) -> int:
    """Multiply two polynomials over GF(2), modulo the CRC's own; the highest bit is the coefficient of 1."""
    result, bit = 0, 1 << 31
    while bit:
        if a & bit:
            result ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return result


def _power_of_x(exponent: int) -> int:
    result, factor = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _product(factor, result)
        factor = _product(factor, factor)
        exponent >>= 1
    return result
