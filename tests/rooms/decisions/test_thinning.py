"""A thinned curve keeps what matters: its ends, its extremes, and what is not finite."""

import math
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.decisions.thinning import Thinned, thinned
from ckptguard.values.curve import MOST_POINTS, Curve, is_finite, is_sound

NAN, INF = math.nan, math.inf
ROOM = 64  # for updates that were asked to be kept
MOST = ROOM + 60
NUMBERS = st.none() | st.integers(-20, 20).map(float) | st.sampled_from([0.5, 1e-30, -0.0, NAN, INF, -INF])
# Mostly finite, so that there is something to thin.
FINITE = st.none() | st.integers(-20, 20).map(float)
SIGNALS = st.one_of(*[st.tuples(*[FINITE] * 4)] * 3, st.tuples(*[NUMBERS] * 4))
GAPS = st.sampled_from([1, 1, 1, 2, 50])
ATTEMPTS = st.lists(st.lists(st.tuples(GAPS, SIGNALS), min_size=1, max_size=100), min_size=1, max_size=4)
SOME = settings(max_examples=80, deadline=None, database=None)


def rows_of(attempts):
    """The updates of each attempt, from what is between their steps."""
    found = []
    for attempt in attempts:
        step, rows = 0, []
        for gap, signals in attempt:
            step += gap
            rows.append((step, *signals))
        found.append(rows)
    return found


def grown(attempts, most=MOST):
    """The curve of some attempts, update by update."""
    curve = Thinned(most)
    for rows in attempts:
        curve.begin()
        for row in rows:
            curve.add(row)
    return curve


def groups_of(attempts, level):
    """All updates with their places, in groups of so many steps."""
    found = {}
    numbered = ((number, row) for number, rows in enumerate(attempts) for row in rows)
    for place, (number, row) in enumerate(numbered):
        found.setdefault((number, row[0] >> level), []).append((place, row))
    return list(found.values())


def staying(group, signals):
    """The places that stay of a group: both ends, and where each signal is smallest and largest first."""
    found = {group[0][0], group[-1][0]}
    for signal in signals:
        finite = [
            (row[signal], place) for place, row in group if row[signal] is not None and math.isfinite(row[signal])
        ]
        if finite:
            found.add(min(finite)[1])
            found.add(min(finite, key=lambda one: (-one[0], one[1]))[1])
    return found


def left_of(attempts, signals, most):
    """What stays at the lowest level at which there is room, and how many could have stayed then."""
    for level in range(128):
        kept = [staying(group, signals) for group in groups_of(attempts, level)]
        could = sum(map(len, kept[:-1])) + 2 + 2 * len(signals)
        if not kept or could <= most:
            return set().union(*kept), could * bool(kept), level
    raise AssertionError


def model(attempts, most=MOST):
    """All that must stay of some attempts, found at once."""
    room = most - ROOM
    places, odd = {}, []
    place = 0
    for number, rows in enumerate(attempts):
        odd.append([])
        for row in rows:
            places[place] = (number, row)
            if not is_finite(row):
                odd[-1].append((place, row))
            place += 1
    real = [place for rows in odd for place, _ in rows]
    stays, could, level = left_of([[row for _, row in rows] for rows in odd], (), room // 2)
    reserved = room // 2 if level else could
    others, _, _ = left_of(attempts, (1, 2, 3, 4), room - reserved)
    return [places[one] for one in sorted(others | {real[one] for one in stays})]


def told(curve):
    """The attempt and the numbers of each update of a curve."""
    attempt, found = -1, []
    for place, row in enumerate(curve.rows()):
        attempt += place in curve.began
        found.append((attempt, repr(row)))
    return found


@SOME
@given(attempts=ATTEMPTS)
def test_update_by_update_is_as_at_once(attempts):
    """What stays is what a second way to find it says: both ends of each group, its extremes, all that is not finite
    while there is room for it."""
    attempts = rows_of(attempts)
    assert told(grown(attempts).curve()) == [(number, repr(row)) for number, row in model(attempts)]


@SOME
@given(attempts=ATTEMPTS, cuts=st.lists(st.integers(0, 6), max_size=3))
def test_a_curve_on_record_goes_on(attempts, cuts):
    """A training that is stopped and started between any attempts leaves the same curve as one that never was."""
    attempts = rows_of(attempts)
    record = Curve()
    for first, last in pairwise([0, *sorted(min(cut, len(attempts)) for cut in cuts), len(attempts)]):
        curve = Thinned(MOST)
        curve.take(record)
        curve.take(grown(attempts[first:last]).curve(), ends=False)
        record = msgspec.json.decode(msgspec.json.encode(curve.curve()), type=Curve)
        assert is_sound(record)
    assert told(record) == told(grown(attempts).curve())
    assert thinned([record], MOST) == record


@SOME
@given(attempts=ATTEMPTS, most=st.integers(ROOM + 40, ROOM + 200))
def test_what_matters_stays(attempts, most):
    """There are never too many; steps are in order; each attempt keeps both ends, and the whole its extremes."""
    attempts = rows_of(attempts)
    curve = grown(attempts, most).curve()
    rows = list(curve.rows())
    assert len(rows) <= most
    assert curve.began[0] == 0
    parts = [rows[a:b] for a, b in pairwise([*curve.began, len(rows)])]
    assert all(a[0] < b[0] for part in parts for a, b in pairwise(part))
    if curve.levels[0] <= 40:  # else some attempts had to share a group
        assert [(repr(p[0]), repr(p[-1])) for p in parts] == [(repr(a[0]), repr(a[-1])) for a in attempts]
    every = [row for rows in attempts for row in rows]
    for signal in (1, 2, 3, 4):
        before, after = (
            [row[signal] for row in found if row[signal] is not None and math.isfinite(row[signal])]
            for found in (every, rows)
        )
        assert (min(before, default=None), max(before, default=None)) == (
            min(after, default=None),
            max(after, default=None),
        )
    odd = [row for row in every if not is_finite(row)]
    if len(odd) + 2 <= (most - ROOM) // 2:
        assert sum(not is_finite(row) for row in rows) == len(odd)


@SOME
@given(attempts=ATTEMPTS, data=st.data())
def test_what_was_asked_for_stays(attempts, data):
    """An update that was kept on purpose is there, whatever comes later, and is marked."""
    attempts = rows_of(attempts)
    curve, wanted = Thinned(MOST), []
    for number, rows in enumerate(attempts):
        curve.begin()
        for row in rows:
            curve.add(row)
        chosen = data.draw(st.sampled_from(rows))
        curve.keep(chosen)
        wanted.append((number, repr(chosen)))
    found = curve.curve()
    assert len(found.step) <= MOST
    if found.levels[0] <= 40:  # so that attempts are told apart
        assert set(wanted) <= set(told(found))
        assert {told(found)[place] for place in found.kept} >= set(wanted)


def test_a_long_training_leaves_few_points_and_every_spike():
    """Of 200,000 updates at most 4,096 stay, with each of 1,000 NaN and each of 20 spikes."""
    curve = Thinned()
    spikes = {9_000 * n + 17 for n in range(1, 21)}
    bad = {190 * n + 3 for n in range(1, 1001)}
    for step in range(1, 200_001):
        loss = NAN if step in bad else 90.0 if step in spikes else 2.0 + (step % 7) / 10
        curve.add((step, loss, 1.0, None, 1e-3))
    found = list(curve.curve().rows())
    assert len(found) <= MOST_POINTS
    assert {row[0] for row in found if row[1] is not None and math.isnan(row[1])} == bad
    assert {row[0] for row in found if row[1] == 90.0} == spikes - bad
    assert (found[0][0], found[-1][0]) == (1, 200_000)


def test_many_attempts_have_room():
    """A training that was started 10,000 times still leaves no more points than the bound."""
    curve = Thinned()
    for number in range(10_000):
        curve.begin()
        for step in range(1, 3):
            curve.add((step, float(number), 1.0, None, None))
    found = curve.curve()
    assert 0 < len(found.step) <= MOST_POINTS
    assert found.loss[0] == 0.0
    assert found.loss[-1] == 9999.0
