"""Which tally each segment of a file gets: the same in a scan and in a save, so both find the same numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptguard.scan.result import Numbers
from ckptguard.scan.tallies import FewTally, Tally

if TYPE_CHECKING:
    from ckptguard.scan.numbers import Reading

_FEW_BYTES = 8 << 10  # bytes of all segments up to which plain numbers are much faster than loading numpy
_SMALL = 64 << 10  # bytes of a segment that is its own sample
_TOGETHER = 512 << 10  # bytes of small segments that are looked at at once: a processor's cache holds them


@dataclass
class Tallies:
    """Makes the tallies of one file with `size` bytes of floats, for one thread. Small segments need none."""

    size: int
    _readings: dict[tuple[str, str], Reading] = field(default_factory=dict)
    _small: dict[tuple[str, str], list[tuple[int, memoryview]]] = field(default_factory=dict)
    waiting: int = 0  # bytes of small segments

    def tally(self, dtype: str, byte_order: str) -> Tally:
        """Return the tally for a segment."""
        if self.size <= _FEW_BYTES:
            return FewTally(dtype, byte_order)
        # numpy is imported only for many floats: by then the digest threads have work.
        from ckptguard.scan.numbers import ArrayTally

        return ArrayTally(self._reading(dtype, byte_order))

    def are_small(self, size: int) -> bool:
        """True if a segment of `size` bytes is looked at with others."""
        return 0 < size <= _SMALL and self.size > _FEW_BYTES

    def add_small(self, number: int, dtype: str, byte_order: str, segment: memoryview) -> bool:
        """Take a whole small segment, which must stay as it is until `settle`. True if it is time for that."""
        self._small.setdefault((dtype, byte_order), []).append((number, segment))
        self.waiting += len(segment)
        return self.waiting > _TOGETHER

    def settle(self) -> dict[int, Numbers]:
        """Return the numbers of the small segments that were added since the last time."""
        if not self._small:
            return {}
        from ckptguard.scan.small_segments import numbers_of_small

        found: dict[int, Numbers] = {}
        for kind, added in self._small.items():
            numbers = numbers_of_small([segment for _, segment in added], self._reading(*kind))
            found.update(zip([number for number, _ in added], numbers, strict=True))
        self._small.clear()
        self.waiting = 0
        return found

    def _reading(self, dtype: str, byte_order: str) -> Reading:
        from ckptguard.scan.numbers import Reading

        reading = self._readings.get((dtype, byte_order))
        if reading is None:
            reading = self._readings[dtype, byte_order] = Reading(dtype, byte_order)
        return reading
