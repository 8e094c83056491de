"""How a run of a fleet is doing: how often it saves, and whether it trains. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median
from typing import NamedTuple

_INTERVALS = 8  # the newest ones count: a run may change how often it saves
_QUIET = 3.0  # save intervals without a save, after which nobody trains
_UNFINISHED = 2.0  # save intervals without a change, after which an unfinished save is late
_SOONEST_LATE = 60.0  # seconds


class Activity(NamedTuple):
    """A time in which something went on, in seconds since 1970."""

    since: float
    until: float


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


def late_in(quiet: float, interval: float | None) -> float | None:
    """Return in how many seconds an unfinished save is late, if nothing changes; 0 or less: it is. None: nobody knows.

    `quiet` is for how many seconds it has not changed. None is late within a minute: a run that saves so often may as
    well be on its way out, and then nothing is recorded in it.
    """
    return None if interval is None else max(_UNFINISHED * interval, _SOONEST_LATE) - quiet


def usual_pause(written_at: Iterable[Iterable[float]]) -> float:
    """Return the usual longest time between two files of one save, by when the files of each were written.

    No pause of the writer is longer: each time is when the writing of one file ended.
    """
    pauses = [max((b - a for a, b in pairwise(sorted(times))), default=0.0) for times in written_at]
    return median(pauses) if pauses else 0.0


def is_training(now: float, newest_at: float | None, interval: float | None) -> bool:
    """True if a save arrived within the last three save intervals."""
    return newest_at is not None and interval is not None and abs(now - newest_at) <= _QUIET * interval


def going_on(before: Activity | None, at: float, interval: float | None) -> Activity:
    """Return an activity with one more sign of it. After a gap of more than a save interval a new one begins."""
    if before is None or at - before.until > (interval or 0.0):
        return Activity(at, at)
    return Activity(before.since, max(before.until, at))


def stopped_saving(
    now: float, saved_at: float | None, interval: float | None, known: Iterable[Activity]
) -> bool | None:
    """True if training goes on, and no save arrived for three save intervals of it. None: nothing shows whether it
    goes on."""
    known = tuple(known)
    if saved_at is None or interval is None or not known:
        return None
    lasting = [one.since for one in known if abs(now - one.until) <= interval]
    return bool(lasting) and now - max(saved_at, min(lasting)) > _QUIET * interval
