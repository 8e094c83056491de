"""What counts as sick and what does not: skips, spikes, exceptions, a scale at its floor. Pure functions."""

import math
import random

import pytest

from ckptguard.decisions.health import Baseline, Health, Limits, Signal, Spikes, cause_of_error, overdue
from ckptguard.errors import SettingsError

SPIKES = Spikes(window=32, warm_up=32, sigma=8.0, factor=4.0, in_a_row=3)


def diagnose(signals, *, health=None, **limits):
    """(health, diagnoses) of some signals, one after the other."""
    health, found = health or Health(), []
    for step, signal in enumerate(signals, 1):
        health, diagnosis = health.after(Signal(step=step, **signal), Limits(**limits))
        found.append(diagnosis)
    return health, found


def sick(found):
    """Which of them are sick, counted from 1."""
    return [n for n, diagnosis in enumerate(found, 1) if diagnosis.sick]


def test_a_new_scaler_may_search_for_its_scale():
    """A scaler that starts at 65536 may skip a dozen updates before its first one; two overflows later are normal."""
    scales = [65536 / 2**n for n in range(12)]
    search = [{"scale": s, "grad_norm": math.inf} for s in scales]
    made = [{"scale": scales[-1], "grad_norm": 1.0, "loss": 1.0}] * 5
    overflow = [{"scale": scales[-1] / 2, "grad_norm": math.inf}, {"scale": scales[-1] / 4, "grad_norm": math.nan}]
    _, found = diagnose([*search, *made, *overflow, *made])
    assert sick(found) == []


def test_a_settled_scaler_may_not_skip_for_long():
    """After its first update the fifth skip in a row acts, and the onset is the first of them."""
    _, found = diagnose([{"scale": 1024.0}] * 3 + [{"scale": 512.0 / 2**n} for n in range(5)])
    assert sick(found) == [8]
    assert (found[-1].cause, found[-1].onset_step, found[-1].evidence["skipped_updates"]) == ("loss_scale", 4, 5)


def test_a_restored_scaler_is_settled():
    """After a rollback it has its scale already, and need not search for it."""
    health = Health().restarted(10)
    assert sick(diagnose([{"scale": 512.0 / 2**n, "grad_norm": math.inf} for n in range(5)], health=health)[1]) == [5]


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf])
def test_a_scale_that_is_no_scale_acts(scale):
    """GradScaler has no floor and halves down to 0; nothing is learned there, whatever the norms say."""
    assert sick(diagnose([{"scale": 2.0, "loss": 1.0}, {"scale": scale, "loss": 1.0, "grad_norm": 0.0}])[1]) == [2]


def test_a_scale_that_is_set_to_its_floor_is_no_fall():
    """A static scale of 1 says nothing; one overflow with it is skipped like any other."""
    made, skip = {"scale": 1.0, "grad_norm": 1.0}, {"scale": 1.0, "grad_norm": math.inf}
    assert sick(diagnose([made, skip, made, skip, skip, made])[1]) == []


def test_skips_that_an_engine_reports_count_without_a_scale():
    """A bf16 engine that skips every update is seen, though it has no loss scale; one skip is not acted on."""
    skip = {"skipped": True, "grad_norm": math.nan, "loss": math.nan, "looked": True}
    made = {"skipped": False, "grad_norm": 1.0, "loss": 1.0}
    _, found = diagnose([made, skip, made, *[skip] * 5], nan_losses=99)
    assert sick(found) == [8]
    assert (found[-1].cause, found[-1].onset_step) == ("skipped", 4)


def test_a_skip_that_an_engine_denies_is_none():
    """Where the engine says the update was made, a norm that is not finite acts at once."""
    assert sick(diagnose([{"skipped": False, "grad_norm": math.inf}])[1]) == [1]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
            "loss_scale",
        ),
        (
            "RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot "
            "be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set ...",
            "grad_norm",
        ),
        ("RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.", "grad_norm"),
        ("RuntimeError: probability tensor contains either `inf`, `nan` or element < 0", "weights"),
        ("RuntimeError: CUDA out of memory", None),
        ("KeyError: 'loss'", None),
        ("ValueError: nan", None),
        ("x" * 100_000, None),
    ],
)
def test_exceptions_that_report_a_sickness(text, cause):
    """Other people's sentences are known by heart; whatever else is raised stays the caller's."""
    assert cause_of_error(text) == cause


def test_the_floor_exception_tells_when_the_row_began():
    """DeepSpeed raises instead of skipping once more: the skips before belong to the same sickness."""
    fall = [{"scale": 16.0, "skipped": False}, *({"scale": 8.0 / 2**n, "skipped": True} for n in range(3))]
    error = {"error": "Exception: Current loss scale already at minimum - cannot decrease scale anymore."}
    _, found = diagnose([*fall, error])
    assert sick(found) == [5]
    assert (found[-1].cause, found[-1].onset_step) == ("loss_scale", 2)


def test_an_exception_of_the_users_own_is_no_sickness():
    """The caller must raise it again, and is told by a healthy diagnosis."""
    assert sick(diagnose([{"error": "KeyError: 'labels'"}])[1]) == []


def test_a_hidden_nan_loss_beside_a_scaler_wants_a_look():
    """A loss of exactly 0 with a sick norm may be a forward pass that overflowed: the buffers decide."""
    hidden = Signal(step=1, loss=0.0, grad_norm=math.nan, scale=8.0)
    assert Health().wants_look(hidden)
    assert not Health().wants_look(Signal(step=1, loss=0.0, grad_norm=1.0, scale=8.0))
    assert not Health().wants_look(Signal(step=1, loss=1.0, grad_norm=math.nan, scale=8.0))


def test_weights_found_late_blame_only_updates_up_to_the_first_nan_loss():
    """What came after the loss turned NaN was done to weights that were poisoned already."""
    fine, nan = {"loss": 1.0}, {"loss": math.nan}
    _, found = diagnose([fine, fine, fine, nan, nan, {"looked": True, "bad_tensor": "w"}])
    assert (found[-1].cause, found[-1].onset_step, found[-1].suspect_through) == ("weights", 3, 4)


def noisy(count, level=2.0, seed=1):
    """Losses around a level, with some noise."""
    generator = random.Random(seed)
    return [level + generator.gauss(0, 0.1) for _ in range(count)]


def test_spikes_are_off_by_default():
    """A finite loss is nobody's business unless it is asked for."""
    assert sick(diagnose([{"loss": v, "grad_norm": v} for v in [*noisy(200), *[1e9] * 50]])[1]) == []


def test_a_row_of_spikes_is_a_sickness():
    """Three in a row act; one or two of them, and a slow rise, do not."""
    values = [*noisy(60), 500.0, *noisy(10), 500.0, 400.0, *noisy(10), 600.0, 700.0, 800.0]
    _, found = diagnose([{"grad_norm": v} for v in values], spikes=SPIKES)
    assert sick(found) == [len(values)]
    assert (found[-1].cause, found[-1].onset_step) == ("spike", len(values) - 2)
    slow = [2.0 * 1.02**n for n in range(300)]
    assert sick(diagnose([{"grad_norm": v, "loss": v} for v in slow], spikes=SPIKES)[1]) == []


def test_a_loss_spike_suspects_the_update_before_it():
    """The first high loss was computed with weights that came out of the update before."""
    _, found = diagnose([{"loss": v} for v in [*noisy(60), 500.0, 600.0, 700.0]], spikes=SPIKES)
    assert (found[-1].cause, found[-1].onset_step) == ("spike", 60)


def test_warm_up_is_ignored():
    """The first values may be anything, also with a learning rate of 0, where all are the same."""
    assert sick(diagnose([{"loss": v} for v in [1e6, 1.0, 1e5, 1.0, *[3.0] * 20]], spikes=SPIKES)[1]) == []
    flat = [{"loss": 3.0, "grad_norm": 1.0}] * 60 + [{"loss": 3.5, "grad_norm": 2.0}] * 20
    assert sick(diagnose(flat, spikes=SPIKES)[1]) == []


def test_a_plateau_after_a_jump_does_not_become_normal():
    """Spikes are not taken into the statistic that they are held against."""
    baseline = Baseline()
    for value in [*noisy(60), *[1000.0] * 100]:
        baseline = baseline.after(value, SPIKES)
    assert baseline.spikes == 100
    assert baseline.median == pytest.approx(2.0, abs=0.2)


def test_what_is_normal_survives_a_rollback():
    """After going back the statistic need not warm up again, and no spike is carried over."""
    health, _ = diagnose([{"loss": v} for v in [*noisy(60), 500.0, 600.0]], spikes=SPIKES)
    again = health.restarted(40)
    assert (again.losses.spikes, again.losses.seen) == (0, 60)
    assert sick(diagnose([{"loss": 900.0}] * 3, health=again, spikes=SPIKES)[1]) == [3]


@pytest.mark.parametrize("nonsense", [{"window": 1}, {"warm_up": 0}, {"sigma": 0}, {"factor": 1.0}, {"in_a_row": 0}])
def test_spikes_that_cannot_be_meant_are_refused(nonsense):
    """A SettingsError, not a guard that goes back at every step."""
    with pytest.raises(SettingsError):
        Spikes(**nonsense)


@pytest.mark.parametrize(("step", "last", "told"), [(30, 0, False), (31, 0, True), (31, 1, False), (31, None, True)])
def test_too_long_without_a_save(step, last, told):
    """More than three intervals without a state on storage are told."""
    assert (overdue(step, last, save_every=10, most=3) is not None) is told
