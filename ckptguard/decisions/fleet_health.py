"""How a run of a fleet is doing: how often it saves, and whether it trains. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median

_INTERVALS = 8  # the newest ones count: a run may change how often it saves
_QUIET = 3.0  # save intervals without a save, after which nobody trains


def newest_saves(saved_at: Iterable[float]) -> tuple[float, ...]:
    """Return those times of saves that say how often a series is saved, oldest first."""
    return tuple(sorted(set(saved_at))[-_INTERVALS - 1 :])


def save_interval(saved_at: Iterable[float]) -> float | None:
    """Return the median time between the newest saves of a series, or None if there are fewer than two."""
    newest = newest_saves(saved_at)
    return median(later - earlier for earlier, later in pairwise(newest)) if len(newest) > 1 else None


def shortest_interval(saved_at: Mapping[str, Iterable[float]]) -> float | None:
    """Return the interval of the series that saves most often: another one may hold only the best."""
    found = (save_interval(times) for times in saved_at.values())
    return min((one for one in found if one is not None), default=None)


def is_training(now: float, newest_at: float | None, interval: float | None) -> bool:
    """True if a save arrived within the last three save intervals."""
    return newest_at is not None and interval is not None and abs(now - newest_at) <= _QUIET * interval
