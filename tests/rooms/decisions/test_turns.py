"""Who goes next, when a turn ends and when a verdict is late: nobody starves, whatever the others do."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ckptguard.decisions.turns import (
    HELD_UP,
    LANES,
    LARGE,
    MOST_LANES,
    FairShare,
    TurnRequest,
    may_yield_for,
    next_lane_in,
    should_yield,
)

SIZES = st.integers(0, 4 * LARGE)


def asking(number: int, *, storage: str = "", large: bool = False, slow: bool = False) -> TurnRequest:
    """One that waits, or has a lane."""
    return TurnRequest(key=number, storage=storage, large=large, slow=slow)


@given(st.lists(SIZES, min_size=2, max_size=8), st.integers(20, 200))
def test_nobody_waits_for_more_than_its_share(sizes: list[int], turns: int) -> None:
    """All have work all the time, with turns of their own sizes: what they were served differs by one turn at most,
    and everybody has had one."""
    share, served = FairShare(), Counter[int]()
    everybody = [asking(number) for number in range(len(sizes))]
    most = max(max(sizes), LARGE // 64)
    for _ in range(turns):
        first = share.choose(everybody, ())
        assert first is not None
        number = everybody.index(first)
        served[number] += max(sizes[number], LARGE // 64)
        share.charge(number, sizes[number])
        assert max(served.values()) - min(served[n] for n in range(len(sizes))) <= most


@given(st.data())
def test_a_small_one_is_next_soon(data: st.DataObject) -> None:
    """Others come, go and read what they like: who keeps on waiting has its turn before any of them has had three."""
    share, had = FairShare(), Counter[int]()
    waiting = {0: asking(0)}
    for _ in range(200):
        if not data.draw(st.booleans()) and len(waiting) > 1:
            waiting.pop(max(waiting))
        coming = data.draw(st.integers(1, 6))
        waiting.setdefault(coming, asking(coming))
        first = share.choose(waiting.values(), ())
        assert first is not None
        if first.key == 0:
            return
        number = int(first.key)  # type: ignore[call-overload]
        had[number] += 1
        assert had[number] < 3
        share.charge(number, data.draw(SIZES))
        del waiting[number]
    raise AssertionError("it never had a turn")


def test_what_was_not_used_is_not_saved_up() -> None:
    """Who had nothing to do for long comes next, and is then one of many."""
    share = FairShare()
    for _ in range(100):
        share.choose([asking(1)], ())
        share.charge(1, LARGE)
    order = []
    for _ in range(4):
        first = share.choose([asking(1), asking(2)], ())
        assert first is not None
        order.append(first.key)
        share.charge(first.key, LARGE)
    assert sorted(order[:2]) == sorted(order[2:]) == [1, 2]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=200))
def test_some_lane_is_left_for_everybody(asked: list[tuple[str, bool, bool]]) -> None:
    """Many slow ones, large ones and one storage that hangs take what they can get. A small one that was quick, on
    another storage, still finds a lane; so does a slow one while the others were quick."""
    busy: list[TurnRequest] = []
    for number, (storage, large, slow) in enumerate(asked):
        one = asking(number, storage=storage, large=large, slow=slow or storage == "a")
        if FairShare().choose([one], busy) is not None:
            busy.append(one)
    assert len(busy) <= MOST_LANES
    large = Counter(one.storage for one in busy if one.large)
    assert large.total() <= 2 * LANES
    assert max(large.values(), default=0) <= LANES
    assert max(Counter(one.storage for one in busy).values(), default=0) <= MOST_LANES * 3 // 4
    if all(one.slow for one in busy):
        assert FairShare().choose([asking(-1, storage="d")], busy) is not None


def test_more_lanes_only_where_they_help() -> None:
    """The first start at once. Further ones start only after all have been busy for a while, and never too many."""
    assert next_lane_in([]) == next_lane_in([9.0] * (LANES - 1)) == 0.0
    assert next_lane_in([9.0] * LANES) == 0.0
    assert next_lane_in([9.0] * LANES + [HELD_UP / 2]) == HELD_UP / 2
    assert next_lane_in([9.0] * MOST_LANES) is None


def test_a_turn_reads_something_and_makes_way() -> None:
    """It ends only if somebody waits, and only after something was read."""
    assert not should_yield(0, 1e9, others_wait=True)
    assert not should_yield(2 * LARGE, 1e9, others_wait=False)
    assert not should_yield(1, 0.1, others_wait=True)
    assert should_yield(LARGE, 0.0, others_wait=True)
    assert should_yield(1, 1.0, others_wait=True)


def test_a_verdict_is_late_after_half_of_the_interval() -> None:
    """Without an interval, it is a guess."""
    assert may_yield_for(0.0, 100.0) == 50.0
    assert may_yield_for(49.0, 100.0) == 1.0
    assert may_yield_for(51.0, 100.0) == 0.0
    assert 0 < may_yield_for(0.0, None) <= 20.0
