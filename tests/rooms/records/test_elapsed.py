"""How much time has passed for sure, whatever wall clocks say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.records.who_and_when import ClockReading, seconds_of, surely_passed, this_moment

YEAR = 365 * 86400.0


def moment(wall, uptime, host="a", boot_id="1"):
    """A moment by both clocks."""
    return ClockReading(wall=wall, host=host, boot_id=boot_id, uptime=uptime)


@given(st.floats(0, YEAR), st.floats(0, YEAR), st.floats(-3 * YEAR, 3 * YEAR))
def test_on_one_start_of_a_machine_only_its_own_clock_counts(start, passed, jump):
    """A wall clock that jumps makes no time pass."""
    found = surely_passed(moment(0.0, start), moment(passed + jump, start + passed))
    assert found == pytest.approx(passed, abs=1e-3)


@given(st.floats(0, YEAR), st.floats(0, YEAR), st.floats(-3 * YEAR, 3 * YEAR))
def test_after_a_restart_and_on_another_machine_nothing_is_sure(before, since, jump):
    """What was before the restart cannot be measured, and a wall clock cannot add to what was since."""
    assert surely_passed(moment(0.0, before), moment(before + since + jump, since, boot_id="2")) == 0.0
    assert surely_passed(moment(0.0, before), moment(before + since + jump, since, host="b", boot_id="2")) == 0.0


def test_where_a_system_tells_no_starts_it_is_by_the_wall_clock():
    """But no more than since the start, and not between two machines; a clock that went back makes no time pass."""
    assert surely_passed(moment(100.0, 5.0, boot_id=""), moment(160.0, 90.0, boot_id="")) == 60.0
    assert surely_passed(moment(100.0, 5.0, boot_id=""), moment(160.0, 30.0, boot_id="")) == 30.0
    assert surely_passed(moment(100.0, 5.0, boot_id=""), moment(40.0, 30.0, boot_id="")) == 0.0
    assert surely_passed(moment(100.0, 5.0, boot_id=""), moment(160.0, 90.0, host="b", boot_id="")) == 0.0


def test_this_moment_goes_on():
    """The machine's own clock never stands still between two looks for long, nor goes back."""
    assert surely_passed(this_moment(), this_moment()) >= 0.0


def test_times_of_records_are_read_and_others_are_none():
    """A time without its zone, or no time at all, says nothing."""
    assert seconds_of("1970-01-01T00:01:00Z") == 60.0
    for text in ("", "yesterday", "2026-01-01T00:00:00", "9" * 400):
        assert seconds_of(text) is None
