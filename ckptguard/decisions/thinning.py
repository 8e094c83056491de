"""Thin the signals of a training to a few thousand updates, so that its curves look as if nothing were missing.

Updates are grouped by attempt and step, 2**level steps to a group. Of each group the first and the last update stay,
and those with the smallest and the largest finite number of each signal. The level rises only when there are too many.
Besides, every update with a number that is not finite stays, until half of the room is theirs. Then these are thinned
in the same way: the first and the last of each group stay.

The result depends only on the updates and their order. It is the same at once and update by update. A training that
continues the curve on record gets the same one, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from ckptguard.values.curve import MOST_POINTS, MOST_SKIPPED, Curve, Row, curve_of, is_finite

_MOST_KEPT = 64  # updates that were asked to be kept
_STEP_BITS = 40  # at this level an attempt is one group; above it, groups are made of several attempts
_HIGHEST = 128
_SIGNALS = (1, 2, 3, 4)

_Point = tuple[int, int, Row]  # its place among all updates, its attempt, itself


class Thinned:
    """A curve that grows by one update after the other, and never has more than `most` of them."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most - _MOST_KEPT
        self._all, self._odd = _Groups(_SIGNALS), _Groups(())
        self._kept: dict[tuple[int, int], _Point] = {}  # by attempt and step
        self._skipped: list[tuple[int, int]] = []
        self._seen = self._attempt = self._for_odd = 0
        self._step = -1

    @property
    def has_points(self) -> bool:
        """True if an update came."""
        return self._seen > 0

    def add(self, row: Row) -> None:
        """Take the next update. One of an earlier step begins a new attempt."""
        if row[0] < self._step:
            self.begin()
        self._step = row[0]
        point = (self._seen, self._attempt, row)
        self._seen += 1
        self._all.add(point)
        if not is_finite(row):
            self._odd.add(point)
            self._reserve(self._odd.most)
            self._odd.fit(self._most // 2)
        self._all.fit(self._most - self._for_odd)

    def begin(self) -> None:
        """Begin a new attempt, unless nothing came in this one."""
        self._attempt += self._step >= 0
        self._step = -1

    def keep(self, row: Row) -> None:
        """Never thin out this update of the current attempt. Of many such only the latest count."""
        self._kept[self._attempt, row[0]] = (self._seen, self._attempt, row)
        while len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    def skip(self, first: int, last: int) -> None:
        """Note that the batches of these updates are left out from now on."""
        self._skipped = [*self._skipped, (first, last)][-MOST_SKIPPED:]

    def take(self, curve: Curve, *, ends: bool = True) -> None:
        """Take a whole curve, which may be thinned already. Unless it `ends`, its last attempt goes on."""
        self.begin()
        self._all.rise(curve.levels[0])
        self._odd.rise(curve.levels[1])
        began, kept = frozenset(curve.began), frozenset(curve.kept)
        for place, row in enumerate(curve.rows()):
            if place in began:
                self.begin()
            self.add(row)
            if place in kept:
                self.keep(row)
        if curve.levels[1]:
            self._reserve(self._most)
            self._all.fit(self._most - self._for_odd)
        for span in curve.skipped:
            self.skip(*span)
        if ends:
            self.begin()

    def curve(self) -> Curve:
        """Return what is left."""
        points = {point[0]: point for groups in (self._all, self._odd) for point in groups.points()}
        there = {(attempt, row[0]) for _, attempt, row in points.values()}
        more = [point for key, point in self._kept.items() if key not in there]
        left = sorted([*points.values(), *more], key=lambda point: (point[1], point[2][0], point[0]))
        attempts = [attempt for _, attempt, _ in left]
        return msgspec.structs.replace(
            curve_of(row for *_, row in left),
            began=tuple(place for place, a in enumerate(attempts) if place == 0 or a != attempts[place - 1]),
            skipped=tuple(self._skipped),
            kept=tuple(place for place, (_, attempt, row) in enumerate(left) if (attempt, row[0]) in self._kept),
            levels=(self._all.level, self._odd.level),
        )

    def _reserve(self, count: int) -> None:
        self._for_odd = min(self._most // 2, max(self._for_odd, count))


def thinned(curves: Iterable[Curve], most: int = MOST_POINTS) -> Curve:
    """Return one curve of several, one after the other."""
    whole = Thinned(most)
    for curve in curves:
        whole.take(curve)
    return whole.curve()


class _Group:
    """Updates of one group. The extremes are those of finite numbers."""

    __slots__ = ("ends", "highest", "highs", "lowest", "lows")

    def __init__(self, signals: int) -> None:
        self.ends: list[_Point] = []
        self.lows, self.highs = [math.inf] * signals, [-math.inf] * signals
        self.lowest: list[_Point | None] = [None] * signals
        self.highest: list[_Point | None] = [None] * signals

    def points(self) -> dict[int, _Point]:
        """Return what stays, by its place."""
        return {point[0]: point for point in (*self.ends, *self.lowest, *self.highest) if point is not None}


class _Groups:
    """Updates in groups of 2**level steps. `signals` are the columns whose extremes stay."""

    def __init__(self, signals: tuple[int, ...]) -> None:
        self.level = 0
        self._signals = signals
        self._width = 2 + 2 * len(signals)  # updates that a group may keep
        self._groups: dict[tuple[int, int], _Group] = {}
        self._closed = 0  # updates in all groups but the last one, which may still lose some

    def add(self, point: _Point) -> None:
        """Take the next update."""
        _, attempt, row = point
        key = (attempt >> max(0, self.level - _STEP_BITS), row[0] >> self.level)
        group = self._groups.get(key)
        if group is None:
            if self._groups:
                self._closed += len(next(reversed(self._groups.values())).points())
            group = self._groups[key] = _Group(len(self._signals))
        group.ends[1:] = [point]
        for number, signal in enumerate(self._signals):
            value = row[signal]
            if value is None:
                continue
            if group.highs[number] < value < math.inf:
                group.highs[number], group.highest[number] = value, point
            if group.lows[number] > value > -math.inf:
                group.lows[number], group.lowest[number] = value, point

    @property
    def most(self) -> int:
        """How many updates may stay. It never falls while updates come in at one level."""
        return self._closed + self._width

    def fit(self, most: int) -> None:
        """Raise the level until there is room in `most` for all that may stay."""
        while self.most > most and self.level < _HIGHEST:
            self.rise(self.level + 1)

    def rise(self, level: int) -> None:
        """Make groups of at least this level."""
        if level > self.level:
            points = self.points()
            self.level, self._groups, self._closed = level, {}, 0
            for point in points:
                self.add(point)

    def points(self) -> list[_Point]:
        """Return what stays, in order."""
        return sorted(point for group in self._groups.values() for point in group.points().values())
