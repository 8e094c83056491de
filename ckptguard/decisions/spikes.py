"""Is a number far above those before it? A running median and its spread over a window. Pure.

Medians, because a mean and a standard deviation follow the very outliers that are looked for. A value that is called
a spike is not remembered as normal, so a plateau after a jump stays a row of spikes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ckptguard.errors import SettingsError

_SIGMA_PER_MAD = 1.4826  # of a normal distribution
_RENEWALS = 8  # the median is computed anew this often in a window: between two it hardly moves


@dataclass(frozen=True, kw_only=True, slots=True)
class Spikes:
    """What counts as a spike: both `sigma` robust deviations above the median of the last `window` values, and
    `factor` times as far from zero as it. `in_a_row` of them are a sickness; the first `warm_up` values are only
    remembered."""

    window: int = 128
    warm_up: int = 128
    sigma: float = 10.0
    factor: float = 5.0
    in_a_row: int = 5

    def __post_init__(self) -> None:
        if self.window < _RENEWALS or self.warm_up < _RENEWALS:
            raise SettingsError(f"window and warm_up of Spikes must be at least {_RENEWALS}")
        if self.sigma <= 0 or self.factor <= 1 or self.in_a_row < 1:
            raise SettingsError("Spikes need a sigma above 0, a factor above 1 and at least 1 in a row")


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What is normal for one number. `spikes`: how many in a row there were up to now."""

    recent: tuple[float, ...] = ()
    seen: int = 0
    median: float = 0.0
    spread: float = 0.0
    spikes: int = 0

    def after(self, value: float, limits: Spikes) -> Baseline:
        """Take in one finite value."""
        if self._is_spike(value, limits):
            return Baseline(
                recent=self.recent, seen=self.seen, median=self.median, spread=self.spread, spikes=self.spikes + 1
            )
        recent = (*self.recent[-limits.window + 1 :], value)
        seen = self.seen + 1
        median, spread = self.median, self.spread
        if seen % max(limits.window // _RENEWALS, 1) == 0 or seen == limits.warm_up:
            median = _middle(recent)
            spread = _SIGMA_PER_MAD * _middle([abs(v - median) for v in recent])
        return Baseline(recent=recent, seen=seen, median=median, spread=spread)

    def _is_spike(self, value: float, limits: Spikes) -> bool:
        if self.seen < limits.warm_up:
            return False
        above = value - self.median
        return above > limits.sigma * self.spread and above > (limits.factor - 1) * abs(self.median)


def _middle(values: Sequence[float]) -> float:
    """The upper median; a tenth of the time of `statistics.median`, which training would wait for."""
    return sorted(values)[len(values) // 2]
