"""What would be lost if a training died now."""

from __future__ import annotations

import pytest

from ckptguard.decisions.at_risk import at_risk, is_stale
from ckptguard.values.run_summary import RunSummary


def facts(**known: object) -> RunSummary:
    """A run that trains, with what is known of it."""
    return RunSummary(**{"url": "/r", "name": "r", "training": True, **known})  # type: ignore[arg-type]


def test_it_is_the_time_since_the_safe_checkpoint_on_all_gpus() -> None:
    """A newer known-good checkpoint that is not safe does not count."""
    found = at_risk(facts(safe_at=1000.0, known_good_at=4000.0, world_size=8, began_at=0.0), now=4600.0)
    assert found is not None
    assert (found.gpu_seconds, found.since, found.world_size, found.remains) == (8 * 3600.0, 1000.0, 8, True)


def test_without_a_safe_checkpoint_all_is_at_risk() -> None:
    """It counts from the first save on record, and the answer says that nothing would remain."""
    found = at_risk(facts(began_at=1000.0), now=4600.0)
    assert found is not None
    assert (found.gpu_seconds, found.world_size, found.remains) == (3600.0, None, False)


@pytest.mark.parametrize("known", [{"training": False, "safe_at": 0.0}, {}])
def test_nothing_is_said_of_what_does_not_train_or_left_no_record(known: dict[str, object]) -> None:
    """Neither has a time since when."""
    assert at_risk(facts(**known), now=10.0) is None


def test_a_clock_that_was_set_back_gives_no_negative_time() -> None:
    """The save lies in the future, as this clock says."""
    found = at_risk(facts(safe_at=100.0), now=50.0)
    assert found is not None
    assert found.gpu_seconds == 0.0


@pytest.mark.parametrize(
    ("known", "stale"),
    [
        ({"known_good_at": 0.0, "save_interval": 99.0}, True),
        ({"known_good_at": 0.0, "save_interval": 100.0}, False),
        ({"known_good_at": 0.0, "save_interval": 99.0, "training": False}, False),
        ({"save_interval": 99.0}, False),
        ({"known_good_at": 0.0}, False),
    ],
)
def test_stale_is_older_than_three_own_intervals_while_it_trains(known: dict[str, object], stale: bool) -> None:
    """Without a known-good checkpoint it is unprotected, which is another matter."""
    assert is_stale(facts(**known), now=300.0) is stale
