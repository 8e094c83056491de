"""What is known of a segment's floats, and the numbers of a tensor from that. Few floats are looked at one by one, so
that a small file needs no numpy: loading it takes longer than all the rest of such a scan."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence

from ckptguard.formats.dtypes import DTYPES, FloatLayout
from ckptguard.scan.result import Numbers

LARGE = 2.0**900  # sums of squares from here on are kept scaled, so that none is ever infinite
SCALE = 2.0**-540
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Tally:
    """What is known of one segment's floats so far; blocks are added in the order of the file."""

    __slots__ = (
        "bits_of_finite",
        "constant",
        "count",
        "first_bad",
        "first_bits",
        "largest",
        "layout",
        "nan",
        "neginf",
        "posinf",
        "single_finite",
    )

    def __init__(self, layout: FloatLayout) -> None:
        self.layout = layout
        self.count = self.nan = self.posinf = self.neginf = 0
        self.first_bad: int | None = None
        self.largest = 0  # bits of the largest finite magnitude
        self.first_bits: int | None = None
        self.bits_of_finite: int | None = None
        self.constant = self.single_finite = True

    def add(self, block: memoryview) -> None:
        """Look at the next floats of the segment; a block holds whole ones."""
        raise NotImplementedError

    def finish(self) -> tuple[int, float, float]:
        """After the last block: how many finite elements the sample of the root mean square holds, the sum
        of their squares, and that of the huge ones, scaled."""
        raise NotImplementedError


class FewTally(Tally):
    """A tally that keeps its floats, and looks at them when all are there."""

    __slots__ = ("_byte_order", "_raw")

    def __init__(self, dtype: str, byte_order: str) -> None:
        layout = DTYPES[dtype].float
        assert layout is not None
        super().__init__(layout)
        self._byte_order = byte_order
        self._raw = b""

    def add(self, block: memoryview) -> None:
        self._raw += block

    def finish(self) -> tuple[int, float, float]:
        layout, order = self.layout, ">" if self._byte_order == "big" else "<"
        self.count = len(self._raw) // layout.size
        bits = struct.unpack(f"{order}{self.count}{_CODES[layout.size]}", self._raw)
        sign, bad = layout.sign, layout.bad
        fine = [b != sign for b in bits] if layout.negative_zero_is_nan else [b & ~sign < bad for b in bits]
        finite = list(itertools.compress(bits, fine))
        self.first_bits, self.constant = bits[0], bits.count(bits[0]) == len(bits)
        if len(finite) < len(bits):
            self.first_bad = fine.index(False)
            if layout.infinity is not None:
                self.posinf, self.neginf = bits.count(layout.infinity), bits.count(layout.infinity | sign)
            self.nan = len(bits) - len(finite) - self.posinf - self.neginf
        if not finite:
            return 0, 0.0, 0.0
        self.bits_of_finite, self.single_finite = finite[0], finite.count(finite[0]) == len(finite)
        magnitudes = [b & ~sign for b in finite]
        self.largest = max(magnitudes)
        values = [layout.magnitude(m) for m in magnitudes]
        total = sum([v * v for v in values])
        if total < LARGE:
            return len(finite), total, 0.0
        return len(finite), 0.0, sum([(v * SCALE) * (v * SCALE) for v in values])


def merge(tallies: Sequence[Tally]) -> Numbers:
    """The numbers of a tensor from those of its segments, in order."""
    rms = _rms_of([tally.finish() for tally in tallies])
    one = tallies[0] if len(tallies) == 1 else _as_one(tallies)
    largest = one.layout.magnitude(one.largest)
    return Numbers(
        count=one.count,
        nan=one.nan,
        posinf=one.posinf,
        neginf=one.neginf,
        first_bad=one.first_bad,
        largest=largest,
        rms=rms,
        constant=one.count > 0 and one.constant,
        zero=one.count > 0 and one.first_bad is None and largest == 0,
        single_finite=one.bits_of_finite is not None and one.single_finite,
    )


def _as_one(tallies: Sequence[Tally]) -> Tally:
    """All that one tally of the segments in a row would know, but for the squares."""
    whole = Tally(tallies[0].layout)
    for tally in tallies:
        if whole.first_bad is None and tally.first_bad is not None:
            whole.first_bad = whole.count + tally.first_bad
        whole.count += tally.count
        whole.nan += tally.nan
        whole.posinf += tally.posinf
        whole.neginf += tally.neginf
        whole.largest = max(whole.largest, tally.largest)
    finite = {t.bits_of_finite for t in tallies if t.bits_of_finite is not None}
    whole.bits_of_finite = min(finite, default=None)
    whole.single_finite = len(finite) == 1 and all(t.single_finite for t in tallies)
    whole.constant = all(t.constant for t in tallies) and len({t.first_bits for t in tallies}) == 1
    return whole


def _rms_of(sums: Sequence[tuple[int, float, float]]) -> float | None:
    """The root mean square over several segments; None if no element of the sample is finite."""
    count, total, large = (sum(column) for column in zip(*sums, strict=True))
    if count == 0:
        return None
    if large:
        return math.sqrt((large + total * SCALE * SCALE) / count) / SCALE
    return math.sqrt(total / count)
