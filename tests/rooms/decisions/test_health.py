"""From signals to a diagnosis, and from a diagnosis to a decision: pure functions."""

import dataclasses
import math

import pytest

from ckptguard.decisions.health import Health, Limits, Signal
from ckptguard.decisions.rollback_policy import RateCut, RollbackPolicy, decide
from ckptguard.errors import SettingsError


def diagnose(*signals, **limits):
    """The diagnoses of some signals, one after the other."""
    health, found = Health(), []
    for step, signal in enumerate(signals, 1):
        health, diagnosis = health.after(Signal(step=step, **signal), Limits(**limits))
        found.append(diagnosis)
    return found


def test_healthy_signals():
    """Finite numbers are healthy, and so is saying nothing."""
    assert not any(d.sick for d in diagnose({"loss": 1.0, "grad_norm": 2.0}, {"loss": 0.0}, {}))


def test_a_non_finite_norm_acts_at_once():
    """The norm is the honest signal; a loss of exactly 0 beside it is named."""
    *_, last = diagnose({"loss": 1.0, "grad_norm": 1.0}, {"loss": 0.0, "grad_norm": math.nan})
    assert (last.cause, last.step) == ("grad_norm", 2)
    assert "exactly 0" in last.reason


@pytest.mark.parametrize(("loss", "onset"), [(3.0, 4), (math.nan, 3)])
def test_the_onset_is_the_first_update_under_suspicion(loss, onset):
    """A finite loss clears the weights that it was computed from; without one the update before is under suspicion."""
    fine = {"loss": 1.0, "grad_norm": 1.0}
    *_, last = diagnose(fine, fine, fine, {"loss": loss, "grad_norm": math.inf})
    assert last.onset_step == onset


def test_poisoned_weights_since_the_last_look():
    """Weights that are found poisoned may be so since the update after the last healthy look."""
    fine = {"looked": True}
    *_, last = diagnose(fine, {}, {}, {"looked": True, "bad_tensor": "w"})
    assert (last.cause, last.onset_step, last.evidence["tensor"]) == ("weights", 2, "w")


def test_nan_losses_count_in_a_row():
    """A NaN loss beside finite gradients counts; any finite one starts the count anew."""
    nan, fine = {"loss": math.nan, "grad_norm": 0.0, "looked": True}, {"loss": 1.0}
    found = diagnose(nan, nan, fine, nan, nan, nan, nan_losses=3)
    assert [d.sick for d in found] == [False] * 5 + [True]
    assert found[-1].onset_step == 4


def test_one_skip_of_a_scaler_is_normal():
    """Skips in a row count, by a falling scale or an infinite norm; an update that was made starts the count anew."""
    skip, made = {"grad_norm": math.inf, "scale": 64.0}, {"grad_norm": 1.0, "scale": 64.0}
    found = diagnose(made, skip, made, skip, skip, skip, scale_skips=3)
    assert [d.sick for d in found] == [False] * 5 + [True]
    assert found[-1].cause == "loss_scale"


def test_a_scale_at_its_floor_acts():
    """Nothing is left to halve: a skip at the floor is no overflow but NaN."""
    found = diagnose({"scale": 4.0}, {"scale": 2.0}, {"scale": 1.0})
    assert [d.sick for d in found] == [False, False, True]


def test_the_first_incident_only_skips():
    """A numeric cause goes back to before the onset and leaves batches out, at the same rate."""
    decision = decide(RollbackPolicy(), [], cause="grad_norm", onset_step=30, save_every=10)
    assert (decision.give_up, decision.before_step, decision.skip, decision.lr_factor) == (False, 30, True, 1.0)


@pytest.mark.parametrize("cause", ["crash", "damage", "asked"])
def test_other_causes_replay(cause):
    """Nothing was wrong with the batches."""
    assert not decide(RollbackPolicy(), [], cause=cause, onset_step=30, save_every=10).skip


@pytest.mark.parametrize(("onset", "further", "factor"), [(50, True, 0.5), (51, False, 1.0)])
def test_near_the_last_incident_it_goes_further_back(onset, further, factor):
    """Within two save intervals: one checkpoint further, and slower; later it is an incident of its own."""
    past = [30]
    decision = decide(RollbackPolicy(), past, cause="weights", onset_step=onset, save_every=10)
    assert (decision.before_step, decision.further, decision.lr_factor) == (onset, further, factor)


@pytest.mark.parametrize("back", [None, 1, 7])
@pytest.mark.parametrize("factors", [(1.0,), (0.5,), (0.5, 1.0), (0.5, 0.5)])
def test_a_cut_is_over_when_as_many_updates_followed_the_last_incident(back, factors):
    """Only where there is a cut, and the policy lets it end; each incident begins the count again."""
    policy, cut = RollbackPolicy(lr_back=back), RateCut()
    for number, factor in enumerate(factors, 1):
        decision = decide(policy, [], cause="weights", onset_step=30, save_every=10)
        cut = cut.after(dataclasses.replace(decision, lr_factor=factor), last=100 * number)
    assert cut.factor == math.prod(factors)
    first = next((step for step in range(1000) if cut.is_over(policy, step)), None)
    assert first == (None if back is None or cut.factor == 1.0 else 100 * len(factors) + back)


def test_the_budget():
    """After as many rollbacks as the budget has, the next incident ends it."""
    past = [100, 200, 300]
    assert not decide(RollbackPolicy(), past[:2], cause="weights", onset_step=900, save_every=10).give_up
    assert decide(RollbackPolicy(), past, cause="weights", onset_step=900, save_every=10).give_up


@pytest.mark.parametrize(
    "nonsense", [{"budget": -1}, {"lr_factor": 0.0}, {"lr_factor": 2.0}, {"nan_losses": 0}, {"lr_back": 0}]
)
def test_nonsense_is_refused(nonsense):
    """A policy that cannot be meant is a SettingsError."""
    with pytest.raises(SettingsError):
        RollbackPolicy(**nonsense)
