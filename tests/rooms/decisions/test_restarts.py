"""Is a supervised command started again? Every rule, one by one."""

import pytest

from ckptguard.decisions.restarts import CommandEnd, NextAction, decide

DIED = {"status": 137, "saved": True, "good_since": True}


@pytest.mark.parametrize(
    ("ended", "then"),
    [
        (CommandEnd(status=0), NextAction.END),
        (CommandEnd(status=0, asked=True, sick=True), NextAction.END),
        (CommandEnd(status=143, asked=True), NextAction.END),
        (CommandEnd(status=143, asked=True, stopped=True, sick=True), NextAction.END),
        (CommandEnd(status=0, sick=True), NextAction.GO_BACK),
        (CommandEnd(status=0, sick=True, stopped=True), NextAction.RESTART),
        (CommandEnd(status=143, sick=True, stopped=True), NextAction.RESTART),
        (CommandEnd(status=1, sick=True, is_first=True), NextAction.RESTART),
        (CommandEnd(status=1, sick=True, died_before=True), NextAction.RESTART),
        (CommandEnd(status=2), NextAction.END),
        (CommandEnd(status=127), NextAction.END),
        (CommandEnd(status=2, saved=True, good_since=True), NextAction.RESTART),
        (CommandEnd(status=1, is_first=True, seconds=1.0), NextAction.END),
        (CommandEnd(status=1, is_first=True, seconds=3600.0), NextAction.RESTART),
        (CommandEnd(status=1, is_first=True, seconds=1.0, saved=True), NextAction.RESTART),
        (CommandEnd(status=137, is_first=True, seconds=1.0), NextAction.RESTART),
        (CommandEnd(status=1, seconds=1.0), NextAction.RESTART),
        (CommandEnd(**DIED), NextAction.RESTART),
        (CommandEnd(**DIED, died_before=True), NextAction.RESTART),
        (CommandEnd(status=137, saved=True, died_before=True), NextAction.END),
        (CommandEnd(status=1, died_before=True), NextAction.END),
        (CommandEnd(status=1, gave_up=True, saved=True, good_since=True), NextAction.END),
        (CommandEnd(status=0, gave_up=True), NextAction.END),
        (CommandEnd(status=1, gave_up=True, sick=True), NextAction.GO_BACK),
        (CommandEnd(status=143, gave_up=True, sick=True, stopped=True), NextAction.RESTART),
    ],
)
def test_what_follows_an_end(ended, then):
    """Asked for, well done, wrong usage and a second death in vain are ends; sickness and death are not."""
    assert decide(ended, restarts=0, most=3)[0] is then


@pytest.mark.parametrize(
    ("restarts", "then"), [(0, NextAction.RESTART), (2, NextAction.RESTART), (3, NextAction.SPENT)]
)
def test_the_budget_counts_every_start_after_the_first(restarts, then):
    """What would be started again is not, once so many starts were made."""
    assert decide(CommandEnd(**DIED), restarts=restarts, most=3)[0] is then
    assert decide(CommandEnd(status=0), restarts=restarts, most=3)[0] is NextAction.END


def test_without_a_budget_nothing_is_put_right():
    """`--max-rollbacks 0` leaves all as it is, and says that saves are sick."""
    assert decide(CommandEnd(status=0, sick=True), restarts=0, most=0)[0] is NextAction.SPENT
    assert decide(CommandEnd(status=143, sick=True, stopped=True), restarts=0, most=0)[0] is NextAction.SPENT
