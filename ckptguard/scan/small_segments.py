"""The numbers of many small segments at once: for each alone, numpy takes longer to begin than to count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptguard.scan.arrays import np
from ckptguard.scan.numbers import ArrayTally, Reading
from ckptguard.scan.result import Numbers
from ckptguard.scan.tallies import LARGE, merge

if TYPE_CHECKING:
    from ckptguard.scan.decode import Bits


def numbers_of_small(segments: Sequence[memoryview], reading: Reading) -> list[Numbers]:
    """Return the numbers of whole segments of one type, each of at most 64 KiB: those of a tally, to the last digit."""
    by_size: dict[int, list[int]] = {}
    for place, segment in enumerate(segments):
        by_size.setdefault(len(segment), []).append(place)
    found: dict[int, Numbers] = {}
    for places in by_size.values():
        joined = np.frombuffer(b"".join([segments[place] for place in places]), reading.unsigned)
        found.update(zip(places, _numbers_of_rows(joined.reshape(len(places), -1), reading), strict=True))
    return [found[place] for place in range(len(segments))]


def _numbers_of_rows(rows: Bits, reading: Reading) -> Iterator[Numbers]:
    """Yield the numbers of each row. One with huge numbers, or any that is not finite, gets a tally."""
    layout, size, decoder = reading.layout, rows.shape[1], reading.stretches.decoder
    native = np.dtype(f"u{rows.itemsize}")
    sign = native.type(layout.sign)
    highest = rows.max(axis=1).astype(native)
    positive = rows.view(reading.signed).max(axis=1).clip(0).astype(native)
    negative = highest & sign != 0
    tops = np.maximum(positive, np.where(negative, highest ^ sign, 0))
    totals = reading.stretches.squares_of_small(rows)
    plain = (tops < layout.bad) & (totals < LARGE)
    if layout.negative_zero_is_nan:
        plain &= ~negative
    zeros = np.zeros(len(rows))
    if np.count_nonzero(rows) < rows.size:
        zeros = (size - np.count_nonzero(rows, axis=1)) / size
    ends = rows[:, -1]
    constant = (ends == rows[:, 0]) & (ends == rows[:, size // 2])
    if constant.any():
        constant[constant] = (rows[constant] == ends[constant, None]).all(axis=1)
    columns = plain, decoder.values_of(tops.astype(rows.dtype)), np.sqrt(totals / size), zeros, constant, ends == 0
    for row, (fine, largest, rms, share, same, ends_in_zero) in enumerate(
        zip(*[column.tolist() for column in columns], strict=True)
    ):
        if fine:
            ending = int((rows[row, ::-1] != 0).argmax()) or size if ends_in_zero else 0
            yield Numbers(
                count=size,
                largest=largest,
                rms=rms,
                zeros=share,
                ending=ending,
                constant=same,
                zero=largest == 0,
                single_finite=same,
            )
        else:
            tally = ArrayTally(reading)
            tally.add(rows[row].data.cast("B"))
            yield merge([tally])
