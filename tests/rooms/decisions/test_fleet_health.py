"""How often a run saves, and whether it trains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.decisions.fleet_health import Activity, going_on, is_training, save_interval, stopped_saving


def test_the_interval_is_the_median_of_the_newest() -> None:
    """Older saves do not count, and one save has no interval."""
    assert save_interval([]) is save_interval([7.0]) is save_interval([7.0, 7.0]) is None
    assert save_interval([0.0, 30.0, 10.0, 500.0]) == 20.0
    assert save_interval([0.0, 1.0, *(100.0 * n for n in range(1, 10))]) == 100.0


@pytest.mark.parametrize(
    ("newest_at", "interval", "expected"),
    [
        (100.0, 10.0, True),
        (71.0, 10.0, True),
        (69.0, 10.0, False),
        (200.0, 10.0, False),
        (None, 10.0, False),
        (100.0, None, False),
    ],
)
def test_it_trains_while_saves_arrive(newest_at, interval, expected):
    """A save within the last three intervals is a sign of training; one from the far future is none."""
    assert is_training(100.0, newest_at, interval) is expected


@given(
    interval=st.floats(10.0, 1e5),
    logs_every=st.floats(0.2, 0.9),
    looks_every=st.floats(0.1, 0.3),
    first_look=st.floats(0.0, 12.0),
    saves_until=st.floats(0.0, 12.0),
    dies=st.floats(0.0, 30.0),
    resumes=st.floats(0.0, 15.0) | st.none(),
)
def test_it_has_stopped_saving_only_while_something_shows_that_it_trains(
    interval: float,
    logs_every: float,
    looks_every: float,
    first_look: float,
    saves_until: float,
    dies: float,
    resumes: float | None,
) -> None:
    """A training that saves at every interval and then no more, that dies some time, and may go on later. Times are in
    intervals. All that is known are the times of its last save and of its last line, at each look from a first one."""
    back = 1e9 if resumes is None else dies + resumes
    lines = [at for n in range(int(32.0 / logs_every)) if not dies <= (at := n * logs_every) < back]
    saves = [float(n) for n in range(13) if n <= min(saves_until, dies)]
    known, was_told = None, False
    for n in range(int((30.0 - first_look) / looks_every)):
        now = first_look + n * looks_every
        line, saved = max(at for at in [-99.0, *lines] if at <= now), max(at for at in saves if at <= now)
        known = going_on(known, line * interval, interval)
        told = stopped_saving(now * interval, saved * interval, interval, [known])
        if told:
            assert now - line < 1.001
            assert now - saved > 2.999
        was_seen_alive = first_look < now - 4.0 and not dies < now < back + 4.0
        if was_seen_alive and now - saved > 4.0:
            assert told
        was_told = was_told or bool(told)
    if dies <= saves[-1] + 2.0 and resumes is None:
        assert not was_told


def test_a_process_that_lives_counts_from_its_begin() -> None:
    """It may be a new training, which has not saved yet."""
    assert stopped_saving(1000.0, 100.0, 10.0, [Activity(990.0, 1000.0)]) is False
    assert stopped_saving(1000.0, 100.0, 10.0, [Activity(900.0, 1000.0)]) is True
    assert stopped_saving(1000.0, 100.0, None, [Activity(900.0, 1000.0)]) is None
    assert stopped_saving(1000.0, 100.0, 10.0, []) is None
