"""Which tally each segment of a file gets: the same in a scan and in a save, so both find the same numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptguard.scan.tallies import FewTally, Tally

if TYPE_CHECKING:
    from ckptguard.scan.numbers import Reading

_TINY = 64  # bytes of a segment up to which plain numbers are faster than arrays
_FEW_BYTES = 8 << 10  # bytes of all segments up to which they are much faster than loading numpy


@dataclass
class Tallies:
    """Makes the tallies of one file with `size` bytes of floats, for one thread."""

    size: int
    _readings: dict[tuple[str, str], Reading] = field(default_factory=dict)

    def tally(self, dtype: str, byte_order: str, size: int) -> Tally:
        """Return the tally for a segment of `size` bytes."""
        if self.size <= _FEW_BYTES or size <= _TINY:
            return FewTally(dtype, byte_order)
        # numpy is imported only for many floats: by then the digest threads have work.
        from ckptguard.scan.numbers import ArrayTally, Reading

        reading = self._readings.get((dtype, byte_order))
        if reading is None:
            reading = self._readings[dtype, byte_order] = Reading(dtype, byte_order)
        return ArrayTally(reading)
