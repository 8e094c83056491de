"""The tallies of a segment's floats, and the numbers of a tensor from them.

A few floats are read one by one. So a small file needs no numpy, which takes longer to load than the rest of the scan.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence

from ckptguard.formats.dtypes import DTYPES, Blocks, FloatLayout
from ckptguard.scan.result import Numbers

LARGE = 2.0**900  # sums of squares above this are scaled, so that none becomes infinite
SCALE = 2.0**-540
# A segment's sample: finite elements, zeros among them, the sum of their squares, and the scaled sum of huge ones.
Sample = tuple[int, int, float, float]
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Tally:
    """What is known about one segment's floats so far; blocks are added in file order."""

    __slots__ = (
        "bits_of_finite",
        "constant",
        "count",
        "ending",
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
        self.ending = 0  # how many floats without any bit set end it
        self.largest = 0  # bits of the largest finite magnitude
        self.first_bits: int | None = None
        self.bits_of_finite: int | None = None
        self.constant = self.single_finite = True

    def add(self, block: memoryview) -> None:
        """Take the next whole floats of the segment."""
        raise NotImplementedError

    def look(self, block: memoryview) -> None:
        """Take the next whole floats, except for the sample. Call `sample` for all of them later."""
        self.add(block)

    def sample(self, data: memoryview) -> None:
        """Take floats that were looked at into the sample. All at once is the cheapest."""

    def close(self) -> object:
        """Note that the last block was added. Only then all but the sample is known."""
        raise NotImplementedError

    def finish(self) -> Sample:
        """Return the sample of a closed tally. Those of a file are summed together: first close them all."""
        raise NotImplementedError


class ScaleReader:
    """Takes the blocks of a quantised type in file order, and gives their scales to a tally."""

    def __init__(self, blocks: Blocks, scales: Tally) -> None:
        self._blocks, self._scales, self._rest = blocks, scales, b""

    def add(self, block: memoryview) -> None:
        """Take the next bytes, which may end inside a block."""
        data = self._rest + bytes(block)
        size, width = self._blocks.size, self._scales.layout.size
        whole = len(data) - len(data) % size
        self._rest = data[whole:]
        places = [offset + byte for offset in self._blocks.offsets for byte in range(width)]
        found = bytearray(whole // size * len(places))
        for number, place in enumerate(places):
            found[number :: len(places)] = data[place:whole:size]
        if found:
            self._scales.add(memoryview(found))

    def close(self) -> None:
        """Note that the last byte was added."""
        self._scales.close()


class FewTally(Tally):
    """A tally that keeps its floats, and reads them when all have arrived."""

    __slots__ = ("_byte_order", "_raw", "_sample")

    def __init__(self, dtype: str, byte_order: str) -> None:
        layout = DTYPES[dtype].float
        assert layout is not None
        super().__init__(layout)
        self._byte_order = byte_order
        self._raw = b""
        self._sample: Sample | None = None

    def add(self, block: memoryview) -> None:
        self._raw += block

    def finish(self) -> Sample:
        if self._sample is not None:
            return self._sample
        layout, order = self.layout, ">" if self._byte_order == "big" else "<"
        self.count = len(self._raw) // layout.size
        bits = struct.unpack(f"{order}{self.count}{_CODES[layout.size]}", self._raw)
        sign, bad = layout.sign, layout.bad
        fine = [b != sign for b in bits] if layout.negative_zero_is_nan else [b & ~sign < bad for b in bits]
        finite = list(itertools.compress(bits, fine))
        self.first_bits, self.constant = bits[0], bits.count(bits[0]) == len(bits)
        self.ending = next((n for n, b in enumerate(reversed(bits)) if b), len(bits))
        if len(finite) < len(bits):
            self.first_bad = fine.index(False)
            if layout.infinity is not None:
                self.posinf, self.neginf = bits.count(layout.infinity), bits.count(layout.infinity | sign)
            self.nan = len(bits) - len(finite) - self.posinf - self.neginf
        if not finite:
            self._sample = 0, 0, 0.0, 0.0
            return self._sample
        self.bits_of_finite, self.single_finite = finite[0], finite.count(finite[0]) == len(finite)
        magnitudes = [b & ~sign for b in finite]
        self.largest = max(magnitudes)
        values, zeros = [layout.magnitude(m) for m in magnitudes], finite.count(0)
        total = sum([v * v for v in values])
        huge = 0.0 if total < LARGE else sum([(v * SCALE) * (v * SCALE) for v in values])
        self._sample = len(finite), zeros, total if total < LARGE else 0.0, huge
        return self._sample

    close = finish  # there is nothing to do between the two


def merge(tallies: Sequence[Tally]) -> Numbers:
    """Return the numbers of a tensor from its segments, in order."""
    one = tallies[0]
    finite, zeros, total, huge = one.finish()
    if len(tallies) > 1:
        finite, zeros, total, huge = map(sum, zip(*[tally.finish() for tally in tallies], strict=True))
        one = _as_one(tallies)
    mean = (total if not huge else huge + total * SCALE * SCALE) / finite if finite else None
    largest = one.layout.magnitude(one.largest)
    return Numbers(
        count=one.count,
        nan=one.nan,
        posinf=one.posinf,
        neginf=one.neginf,
        first_bad=one.first_bad,
        largest=largest,
        rms=None if mean is None else math.sqrt(mean) / (SCALE if huge else 1.0),
        zeros=zeros / finite if finite else None,
        ending=one.ending,
        constant=one.count > 0 and one.constant,
        zero=one.count > 0 and one.first_bad is None and largest == 0,
        single_finite=one.bits_of_finite is not None and one.single_finite,
    )


def _as_one(tallies: Sequence[Tally]) -> Tally:
    """Return one tally for all segments in order, without the squares."""
    whole = Tally(tallies[0].layout)
    for tally in tallies:
        if whole.first_bad is None and tally.first_bad is not None:
            whole.first_bad = whole.count + tally.first_bad
        whole.ending = tally.ending + (whole.ending if tally.ending == tally.count else 0)
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
