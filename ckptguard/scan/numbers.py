"""Counting NaN and infinities, and finding the largest magnitude, by integers alone.

A float's bits without the sign, as an integer, order as magnitudes do. So one maximum over a block says whether all
of it is finite and how large it is, in every float type, also in those that numpy does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckptguard.formats.dtypes import DTYPES, FloatLayout
from ckptguard.scan.result import Numbers
from ckptguard.scan.squares import Decode, SquareSum, rms_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bits = NDArray[np.unsignedinteger]


class Tally:
    """What is known of one segment's floats so far; blocks are added in the order of the file."""

    __slots__ = (
        "bits_of_finite",
        "constant",
        "count",
        "first_bad",
        "first_bits",
        "largest",
        "nan",
        "neginf",
        "posinf",
        "reading",
        "single_finite",
        "squares",
    )

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.squares = SquareSum(reading.decode)
        self.count = self.nan = self.posinf = self.neginf = 0
        self.first_bad: int | None = None
        self.largest = 0  # bits of the largest finite magnitude
        self.first_bits: int | None = None
        self.bits_of_finite: int | None = None
        self.constant = self.single_finite = True

    def add(self, block: memoryview) -> None:
        """Look at the next floats of the segment; a block holds whole ones."""
        reading = self.reading
        bits: Bits = np.frombuffer(block, reading.unsigned)
        if not bits.flags.aligned:
            bits = bits.copy()
        layout = reading.layout
        if self.first_bits is None:
            self.first_bits = int(bits[0])
        # Without a temporary: the largest with a clear sign bit, and the largest with a set one.
        highest, positive = int(bits.max()), int(bits.view(reading.signed).max())
        top = max(positive, highest ^ layout.sign if highest & layout.sign else 0)
        if top >= layout.bad or (layout.negative_zero_is_nan and highest & layout.sign):
            self._add_suspicious(bits)
        else:
            self.largest = max(self.largest, top)
            if self.bits_of_finite is None:
                self.bits_of_finite = int(bits[0])
            if self.single_finite:
                self.single_finite = _all_equal(bits, self.bits_of_finite)
        if self.constant:
            self.constant = _all_equal(bits, self.first_bits)
        self.squares.add(bits)
        self.count += len(bits)

    def _add_suspicious(self, bits: Bits) -> None:
        layout = self.reading.layout
        sign = bits.dtype.type(layout.sign)
        magnitudes = bits & ~sign
        bad = bits == sign if layout.negative_zero_is_nan else magnitudes >= bits.dtype.type(layout.bad)
        count = int(np.count_nonzero(bad))
        if count:
            if self.first_bad is None:
                self.first_bad = self.count + int(bad.argmax())
            if layout.infinity is not None:
                posinf = int(np.count_nonzero(bits == bits.dtype.type(layout.infinity)))
                neginf = int(np.count_nonzero(bits == bits.dtype.type(layout.infinity | layout.sign)))
                self.posinf += posinf
                self.neginf += neginf
                count -= posinf + neginf
            self.nan += count
        finite = ~bad
        if finite.any():
            self.largest = max(self.largest, int(magnitudes[finite].max()))
            own = bits[finite]
            if self.bits_of_finite is None:
                self.bits_of_finite = int(own[0])
            if self.single_finite:
                self.single_finite = _all_equal(own, self.bits_of_finite)


class Reading:
    """How the floats of a segment are read: as integers of their size and byte order."""

    __slots__ = ("decode", "layout", "signed", "unsigned")

    def __init__(self, dtype: str, byte_order: str) -> None:
        layout = DTYPES[dtype].float
        assert layout is not None
        self.layout: FloatLayout = layout
        order = ">" if byte_order == "big" else "<"
        self.unsigned = np.dtype(f"{order}u{layout.size}")
        self.signed = np.dtype(f"{order}i{layout.size}") if layout.sign else self.unsigned
        self.decode = Decode(layout, byte_order)


def merge(tallies: Sequence[Tally]) -> Numbers:
    """The numbers of a tensor from those of its segments, in order."""
    layout = tallies[0].reading.layout
    count = 0
    first_bad: int | None = None
    for tally in tallies:
        if tally.first_bad is not None and first_bad is None:
            first_bad = count + tally.first_bad
        count += tally.count
    finite = {t.bits_of_finite for t in tallies if t.bits_of_finite is not None}
    largest = max(t.largest for t in tallies)
    return Numbers(
        count=count,
        nan=sum(t.nan for t in tallies),
        posinf=sum(t.posinf for t in tallies),
        neginf=sum(t.neginf for t in tallies),
        first_bad=first_bad,
        largest=layout.magnitude(largest),
        rms=rms_of([t.squares for t in tallies]),
        constant=count > 0 and all(t.constant for t in tallies) and len({t.first_bits for t in tallies}) == 1,
        zero=count > 0 and first_bad is None and layout.magnitude(largest) == 0,
        single_finite=len(finite) == 1 and all(t.single_finite for t in tallies),
    )


def _all_equal(bits: Bits, value: int) -> bool:
    if int(bits[-1]) != value or int(bits[len(bits) // 2]) != value or int(bits[0]) != value:
        return False  # nearly always the end of it
    return bool((bits == bits.dtype.type(value)).all())
