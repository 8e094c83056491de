"""The root mean square of a fixed sample: the same number for every way to read a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptguard.scan.arrays import np
from ckptguard.scan.tallies import LARGE, SCALE

if TYPE_CHECKING:
    from ckptguard.scan.decode import Bits, Decoder, Values

# The sample: the first 64 KiB, then the first 4 KiB of every 31 * 4 KiB. Not a power of two, so that usual matrix
# widths are not always sampled in the same columns.
_STRETCH = 4 << 10
_HEAD = 16 * _STRETCH
_STEP = 31 * _STRETCH
_TOGETHER = 64 * _STRETCH  # bytes that are summed at once
_VALUES = 16 << 10  # elements that are decoded at once: a processor's cache holds them


class Stretches:
    """Sums the stretches of many segments of one type together: for each alone, numpy takes longer to begin."""

    __slots__ = ("_room", "_values", "_waiting", "decoder")

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._values = np.empty(_VALUES)  # the same memory each time: what is new costs as much as the sum
        self._waiting: dict[int, list[tuple[SquareSum, Bits]]] = {}  # by the width of their rows
        self._room = _TOGETHER

    def add(self, segment: SquareSum, rows: Bits) -> None:
        """Take the next stretches of a segment. One that is not full is its last."""
        if rows.nbytes > _TOGETHER:
            self.sum_up()
            segment.take(rows, self.squares(rows))
            return
        self._waiting.setdefault(rows.shape[1], []).append((segment, rows.copy()))  # the block may be overwritten
        self._room -= rows.nbytes
        if self._room < 0:
            self.sum_up()

    def sum_up(self) -> None:
        """Give each segment the sums of what it added."""
        for width in sorted(self._waiting, reverse=True):  # so the last stretch of a segment comes last
            waiting = self._waiting.pop(width)
            totals = self.squares(np.concatenate([own for _, own in waiting], dtype=self.decoder.bits))
            at = 0
            for segment, own in waiting:
                segment.take(own, totals[at : at + len(own)])
                at += len(own)
        self._room = _TOGETHER

    def squares(self, rows: Bits) -> Values:
        """Return the sum of squares of each row."""
        totals, width = np.empty(len(rows)), rows.shape[1]
        step = _VALUES // width
        with np.errstate(all="ignore"):
            for begin in range(0, len(rows), step):
                some = rows[begin : begin + step]
                values = self.decoder.values_of(some, self._values[: some.size].reshape(some.shape))
                # Faster than einsum.
                totals[begin : begin + step] = np.matmul(values[:, None, :], values[:, :, None]).ravel()
        return totals

    def squares_of_small(self, rows: Bits) -> Values:
        """Return the sum of squares of each row, which is a segment of at most 64 KiB, as a SquareSum adds it up."""
        stretch = _STRETCH // rows.itemsize
        whole = rows.shape[1] // stretch
        totals = np.zeros(len(rows))
        with np.errstate(all="ignore"):
            if whole:
                for sums in self.squares(rows[:, : whole * stretch].reshape(-1, stretch)).reshape(-1, whole).T:
                    totals += sums
            if whole * stretch < rows.shape[1]:
                totals += self.squares(rows[:, whole * stretch :])
        return totals


class SquareSum:
    """Adds up squares of one segment's finite elements, stretch by stretch of its sample, in file order.

    A stretch that arrives in pieces waits until it is whole, so rounding never depends on block borders.
    """

    __slots__ = ("_begun", "_count", "_large", "_position", "_size", "_stretches", "_total", "_zeros")

    def __init__(self, stretches: Stretches) -> None:
        self._stretches = stretches
        self._size = stretches.decoder.bits.itemsize
        self._position = self._count = self._zeros = 0
        self._total = self._large = 0.0
        self._begun: list[Bits] = []

    def add(self, bits: Bits) -> None:
        """Take the next elements of the segment."""
        head = max(_HEAD // self._size - self._position, 0)
        if head:
            self._add_grid(bits[:head], self._position, _STRETCH // self._size)
        if head < len(bits):
            begin = self._position + head - _HEAD // self._size
            self._add_grid(bits[head:], begin, _STEP // self._size)
        self._position += len(bits)

    def _add_grid(self, bits: Bits, begin: int, step: int) -> None:
        """Take elements from `begin` on of a row in which a stretch begins at each multiple of `step`."""
        stretch = _STRETCH // self._size
        if 0 < begin % step < stretch:
            self._begun.append(bits[: stretch - begin % step].copy())
            if begin % step + len(bits) >= stretch:
                self._finish_stretch()
        first = -begin % step
        whole = (len(bits) - first - stretch) // step + 1
        if whole > 0:
            strides = (step * self._size, self._size)
            rows = np.ndarray((whole, stretch), bits.dtype, bits, first * self._size, strides)
            self._stretches.add(self, rows)
            first += whole * step
        if first < len(bits):
            self._begun.append(bits[first : first + stretch].copy())

    def _finish_stretch(self) -> None:
        row = self._begun[0] if len(self._begun) == 1 else np.concatenate(self._begun, dtype=self._begun[0].dtype)
        self._begun.clear()
        self._stretches.add(self, row.reshape(1, -1))

    def take(self, rows: Bits, totals: Values) -> None:
        """Take the sums of squares of the next stretches."""
        self._zeros += rows.size - int(np.count_nonzero(rows))  # integers are counted many times as fast as floats
        for number, total in enumerate(totals.tolist()):
            if total < LARGE:
                self._total += total
                self._count += rows.shape[1]
            else:
                self._add_with_care(self._stretches.decoder.values_of(rows[number]))

    def _add_with_care(self, row: Values) -> None:
        """Take a stretch with elements that are not finite, or whose squares are huge."""
        finite = row[np.isfinite(row)]
        self._count += len(finite)
        total = float(np.einsum("i,i->", finite, finite))
        if total < LARGE:
            self._total += total
        else:
            finite *= SCALE
            self._large += float(np.einsum("i,i->", finite, finite))

    def close(self) -> None:
        """Note that this was all."""
        if self._begun:
            self._finish_stretch()

    def sums(self) -> tuple[int, int, float, float]:
        """Return the number of elements and of zeros among them, the sum of squares, and the scaled sum of huge
        ones."""
        self.close()
        self._stretches.sum_up()
        return self._count, self._zeros, self._total, self._large
