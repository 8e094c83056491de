"""How often a run saves, and whether it trains."""

import pytest

from ckptguard.decisions.fleet_health import is_training, save_interval


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
