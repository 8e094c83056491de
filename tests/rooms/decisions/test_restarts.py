"""Is a supervised command started again? Every rule, one by one."""

import pytest

from ckptguard.decisions.restarts import Ended, Then, decide

DIED = {"status": 137, "saved": True, "good_since": True}


@pytest.mark.parametrize(
    ("ended", "then"),
    [
        (Ended(status=0), Then.END),
        (Ended(status=0, asked=True, sick=True), Then.END),
        (Ended(status=143, asked=True), Then.END),
        (Ended(status=143, asked=True, stopped=True, sick=True), Then.END),
        (Ended(status=0, sick=True), Then.GO_BACK),
        (Ended(status=0, sick=True, stopped=True), Then.RESTART),
        (Ended(status=143, sick=True, stopped=True), Then.RESTART),
        (Ended(status=1, sick=True, is_first=True), Then.RESTART),
        (Ended(status=1, sick=True, died_before=True), Then.RESTART),
        (Ended(status=2), Then.END),
        (Ended(status=127), Then.END),
        (Ended(status=2, saved=True, good_since=True), Then.RESTART),
        (Ended(status=1, is_first=True, seconds=1.0), Then.END),
        (Ended(status=1, is_first=True, seconds=3600.0), Then.RESTART),
        (Ended(status=1, is_first=True, seconds=1.0, saved=True), Then.RESTART),
        (Ended(status=137, is_first=True, seconds=1.0), Then.RESTART),
        (Ended(status=1, seconds=1.0), Then.RESTART),
        (Ended(**DIED), Then.RESTART),
        (Ended(**DIED, died_before=True), Then.RESTART),
        (Ended(status=137, saved=True, died_before=True), Then.END),
        (Ended(status=1, died_before=True), Then.END),
        (Ended(status=1, gave_up=True, saved=True, good_since=True), Then.END),
        (Ended(status=0, gave_up=True), Then.END),
        (Ended(status=1, gave_up=True, sick=True), Then.GO_BACK),
        (Ended(status=143, gave_up=True, sick=True, stopped=True), Then.RESTART),
    ],
)
def test_what_follows_an_end(ended, then):
    """Asked for, well done, wrong usage and a second death in vain are ends; sickness and death are not."""
    assert decide(ended, restarts=0, most=3)[0] is then


@pytest.mark.parametrize(("restarts", "then"), [(0, Then.RESTART), (2, Then.RESTART), (3, Then.SPENT)])
def test_the_budget_counts_every_start_after_the_first(restarts, then):
    """What would be started again is not, once so many starts were made."""
    assert decide(Ended(**DIED), restarts=restarts, most=3)[0] is then
    assert decide(Ended(status=0), restarts=restarts, most=3)[0] is Then.END


def test_without_a_budget_nothing_is_put_right():
    """`--max-rollbacks 0` leaves all as it is, and says that saves are sick."""
    assert decide(Ended(status=0, sick=True), restarts=0, most=0)[0] is Then.SPENT
    assert decide(Ended(status=143, sick=True, stopped=True), restarts=0, most=0)[0] is Then.SPENT
