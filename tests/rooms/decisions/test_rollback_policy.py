"""Where to go back to, how often, and with what changed. Pure."""

import pytest

from ckptguard.decisions.rollback_policy import RollbackPolicy, before_repeat, choose_target, decide
from ckptguard.errors import SettingsError


def target(policy, steps, onset, past=()):
    """The step that the policy goes back to, given the steps of known-good checkpoints."""
    decision = decide(policy, past, cause="grad_norm", onset_step=onset, save_every=10)

    def good_before(limit):
        return max((step for step in steps if step < limit), default=None)

    return choose_target(decision, good_before, onset_step=onset)


STEPS = [0, 10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("policy", "onset", "found"),
    [
        (RollbackPolicy(), 45, 40),
        (RollbackPolicy(), 40, 30),
        (RollbackPolicy(margin=5), 45, 30),
        (RollbackPolicy(margin=4), 45, 40),
        (RollbackPolicy(proven=20), 45, 20),
        (RollbackPolicy(proven=20, margin=30), 45, 10),
        (RollbackPolicy(proven=1000), 45, 40),  # a preference that nothing meets
        (RollbackPolicy(margin=1000), 45, 0),
        (RollbackPolicy(), 1, 0),
    ],
)
def test_margin_and_proven(policy, onset, found):
    """So many updates before the onset, and so many healthy updates beyond the checkpoint, where there is one."""
    assert target(policy, STEPS, onset) == found


def test_further_back_with_every_repeat():
    """The second near incident goes one checkpoint further, the third two, and the oldest is the end of it."""
    past = [45]
    assert target(RollbackPolicy(budget=9), STEPS, 48, past) == 30
    past.append(48)
    assert target(RollbackPolicy(budget=9), STEPS, 47, past) == 20
    past += [47] * 4
    assert target(RollbackPolicy(budget=9), STEPS, 47, past) == 0


def test_a_row_of_repeats_ends_with_distance():
    """An incident far from the last one is an incident of its own."""
    past = [5, 7]
    assert target(RollbackPolicy(), STEPS, 48, past) == 40


def test_nothing_before_the_onset():
    """Then there is nothing to go back to."""
    assert target(RollbackPolicy(), [50, 60], 45) is None


@pytest.mark.parametrize(
    ("steps", "limit", "last", "before"),
    [
        (STEPS, 45, None, 45),  # the first time
        (STEPS, 45, 30, 45),  # from elsewhere
        (STEPS, 45, 40, 40),  # from where it would go again: one further
        ([40], 45, 40, 45),  # there is no older one
        ([], 45, 40, 45),
    ],
)
def test_a_repeat_outside_of_training(steps, limit, last, before):
    """Supervise goes one further by the same rule."""

    def good_before(step):
        return max((known for known in steps if known < step), default=None)

    assert before_repeat(good_before, limit, last=last) == before


def test_only_a_collapsed_scale_is_reset():
    """Other causes leave the scaler as it was saved."""
    policy = RollbackPolicy(reset_scale=128.0)
    assert decide(policy, [], cause="loss_scale", onset_step=9, save_every=2).reset_scale == 128.0
    assert decide(policy, [], cause="weights", onset_step=9, save_every=2).reset_scale is None


@pytest.mark.parametrize(
    "nonsense", [{"margin": -1}, {"proven": -1}, {"reset_scale": 0.0}, {"reset_scale": float("nan")}, {"unsaved": 0}]
)
def test_nonsense_is_refused(nonsense):
    """A policy that cannot be meant is a SettingsError."""
    with pytest.raises(SettingsError):
        RollbackPolicy(**nonsense)


@pytest.mark.parametrize(
    ("onset", "last", "words"),
    [
        (21, 21, "skipping the batch of update 21"),
        (21, None, "skipping the batch of update 21"),
        (20, 23, "skipping the batches of updates 20 to 23"),
    ],
)
def test_a_reason_names_the_batches_that_are_skipped(onset, last, words):
    """People look at these batches, so they must know which ones are meant."""
    assert decide(RollbackPolicy(), [], cause="weights", onset_step=onset, save_every=10, last=last).reason == words


def test_a_reason_names_more_batches_where_a_repeat_skips_more():
    """A repeat skips all since the last look at the weights."""
    past = [18]
    again = decide(RollbackPolicy(), past, cause="weights", onset_step=18, save_every=10, possibly_since=13, last=18)
    assert again.reason.endswith("skipping the batches of updates 13 to 18")
