"""Decide which of many runs works next, when it yields to others, and when its verdict is late. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable

import msgspec

LARGE = 64 * 1024**2  # bytes; reading more than this at a time yields to training, in a few lanes
LANES = 4  # lanes that start at once, and the most of one storage that may read a large checkpoint at a time
MOST_LANES = 32
_SPARE_LANES = 4  # the last lanes; no run that was slow gets them
SLOW = 2.0  # seconds; a longer turn is slow
HELD_UP = 0.5  # seconds; a lane that is busy for longer may be waiting for storage, so another one may start
_LONGEST_TURN = 1.0  # seconds until a run yields to a waiting one, between two checkpoints
_USUAL_INTERVAL = 20.0  # seconds between two saves, if nothing is known about them


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One that waits for a lane or has one. `storage` is where it reads.

    `large`: it reads more than `LARGE` bytes at a time. `slow`: its last turn took longer than `SLOW` seconds.
    """

    key: Hashable
    storage: str = ""
    large: bool = False
    slow: bool = False


class FairShare:
    """Shares bytes evenly. The next one is the one that was served the fewest bytes while others waited."""

    def __init__(self) -> None:
        self._served: dict[Hashable, float] = {}
        self._floor = 0.0  # what the last one chosen had been served: who comes later starts from there

    def choose(self, waiting: Iterable[TurnRequest], busy: Collection[TurnRequest]) -> TurnRequest | None:
        """Return who gets a free lane now. Of equal ones it is the one that waits the longest, so the first."""
        free, at_storage = MOST_LANES - len(busy), Counter(one.storage for one in busy)
        large = Counter(one.storage for one in busy if one.large)
        usable = (one for one in waiting if _may_have_a_lane(one, free, at_storage[one.storage], large))
        first = min(usable, key=lambda one: self._start(one.key), default=None)
        if first is not None:
            self._floor = self._start(first.key)
            self._served = {key: served for key, served in self._served.items() if served > self._floor}
        return first

    def charge(self, key: Hashable, size: int) -> None:
        """Count what a turn read. Each turn counts as something, so that no run can have all of them."""
        self._served[key] = self._start(key) + max(size, LARGE // 64)

    def _start(self, key: Hashable) -> float:
        return max(self._served.get(key, 0.0), self._floor)


def _may_have_a_lane(one: TurnRequest, free: int, at_storage: int, large: Counter[str]) -> bool:
    """True unless it must leave the free lanes to others: one storage that hangs must not hold all lanes.

    `at_storage` lanes read where it reads. `large` counts those that read large checkpoints, by storage.
    """
    if (one.large and not may_read_large(large, one.storage)) or (one.slow and free <= _SPARE_LANES):
        return False
    return free > 0 and at_storage < MOST_LANES * 3 // 4


def may_read_large(large: Counter[str], storage: str) -> bool:
    """True if one more run of this storage may read a large checkpoint. One storage that hangs must not hold up the
    large checkpoints of another. `large` counts the lanes that read one, by storage."""
    return large[storage] < LANES and large.total() < 2 * LANES


def next_lane_in(busy_for: Collection[float]) -> float | None:
    """Return in how many seconds a further lane may start, or None for never. `busy_for` has the seconds for which each
    lane was busy.

    The first ones start at once. More of them help only while all the others may be waiting for storage.
    """
    if len(busy_for) < LANES:
        return 0.0
    return None if len(busy_for) >= MOST_LANES else max(0.0, HELD_UP - min(busy_for))


def should_yield(read: int, seconds: float, *, others_wait: bool) -> bool:
    """True if a turn ends before its next checkpoint. `read` is what it read so far, in bytes: one at least."""
    return others_wait and read > 0 and (read >= LARGE or seconds >= _LONGEST_TURN)


def may_yield_for(waited: float, interval: float | None) -> float:
    """Return for how many seconds a verdict may still wait for what training leaves of the processors.

    It is late once it has waited for half of the time between two saves.
    """
    return max(0.0, (_USUAL_INTERVAL if interval is None else interval) / 2 - waited)
