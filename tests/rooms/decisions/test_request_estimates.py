"""How often a run on an object store is looked at, and what that costs."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ckptguard.decisions.store_requests import cost_of_looks, longest_pause, next_pause

SECONDS = st.floats(min_value=0.1, max_value=7200.0)


@given(interval=SECONDS, last=st.floats(min_value=0.0, max_value=7200.0), saves=st.none() | SECONDS)
def test_a_change_is_followed_by_a_look_soon(interval: float, last: float, saves: float | None) -> None:
    """After a change the run is looked at as often as its settings say, whatever was before."""
    assert next_pause(interval, last, changed=True, save_interval=saves) == interval


@given(interval=SECONDS, saves=st.none() | SECONDS)
def test_a_quiet_run_is_looked_at_less_and_less(interval: float, saves: float | None) -> None:
    """The pauses never fall while nothing changes, at most double, and stay below a quarter of an hour, or the
    interval of the settings if that is longer."""
    pauses = [interval]
    for _ in range(12):
        pauses.append(next_pause(interval, pauses[-1], changed=False, save_interval=saves))
    assert all(earlier <= later <= 2 * earlier for earlier, later in itertools.pairwise(pauses))
    assert all(interval <= pause <= max(interval, 900.0) for pause in pauses)


def test_a_training_is_not_left_for_long() -> None:
    """Of a run that saves each ten minutes nobody waits longer than a quarter of that for a look."""
    assert next_pause(30.0, 120.0, changed=False, save_interval=600.0) == 150.0
    assert next_pause(30.0, 120.0, changed=False, save_interval=40.0) == 30.0


def test_the_default_reaches_a_quarter_of_an_hour() -> None:
    """Thirty times thirty seconds; shorter and longer settings stay what they are."""
    assert [longest_pause(interval) for interval in (1.0, 30.0, 60.0, 3600.0)] == [30.0, 900.0, 900.0, 3600.0]


def test_the_price_of_an_idle_fleet() -> None:
    """500 runs of up to a thousand objects: 2,880 looks a month each, at half a cent for a thousand listings."""
    cost = cost_of_looks([900.0] * 500)
    assert cost.requests == 500 * 2880
    assert cost.dollars == pytest.approx(7.2)
    assert cost_of_looks([900.0], objects=1001).requests == 2 * 2880
