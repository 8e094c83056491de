"""The likely causes of an incident: each rule on the evidence that speaks for it, and on what speaks against it."""

import msgspec
import pytest

from ckptguard.reporting.causes import likely_causes
from ckptguard.reporting.evidence_queries import CauseEvidence, growth
from ckptguard.values.incident import (
    CheckpointFacts,
    Details,
    IncidentReport,
    LikelyCause,
    Magnitude,
    Resumed,
    Sample,
    SickTensor,
    Training,
    number,
    worded,
)

HALF = Training(dtypes={"float16": 100}, autocast="off", loss_scaler="none", optimizer="AdamW", eps=1e-8)
FULL = Training(dtypes={"float32": 100}, autocast="off", loss_scaler="none", optimizer="AdamW", eps=1e-8)
SPOILED = (SickTensor(name="w", kind="weight", nan=3, elements=4),)


def calm(count=60, *, first=1000, norm=0.7, scale=None, rate=1e-3):
    """Samples of healthy updates."""
    return tuple(Sample(first + n, 2.0 + 0.01 * (n % 3), norm + 0.01 * (n % 5), scale, rate) for n in range(count))


def report(cause="grad_norm", *, step=1060, evidence=None, **details):
    """An incident noticed at `step`; its onset is that step unless said."""
    details.setdefault("onset", step)
    return IncidentReport(
        run="/runs/a",
        id="20260131T120000-0a1b2c3d",
        opened_at="2026-01-31T12:00:00Z",
        step=step,
        cause=cause,
        reason="the gradient norm is nan",
        state="closed",
        source="guard",
        actions=(),
        known_good=None,
        evidence=evidence or {},
        details=Details(**details),
    )


def names(found: IncidentReport) -> list[str]:
    """The causes in order."""
    return [c.name for c in likely_causes(found)]


def one(found: IncidentReport, name: str) -> LikelyCause:
    """That cause, which must be among them."""
    return next(c for c in likely_causes(found) if c.name == name)


def good(largest=None, **more):
    """A last good checkpoint."""
    sizes = (Magnitude("w", largest, "F16"),) if largest is not None else ()
    return CheckpointFacts(path="checkpoint-1000", step=1000, id="1000.1", outcome="good", largest=sizes, **more)


def falling(count=5, *, first=1060, start=65536.0):
    """Updates that a loss scaler skipped one after the other."""
    return tuple(Sample(first + n, 2.0, "inf", start / 2 ** (n + 1), 1e-3) for n in range(count))


def test_a_falling_scale_with_little_headroom_is_likely_an_overflow():
    """Scale history, headroom and infinity speak for it; it comes first."""
    samples = calm(scale=65536.0) + falling()
    found = report("loss_scale", step=1064, onset=1060, samples=samples, training=HALF, last_good=good(41235.0))
    assert names(found)[0] == "fp16_overflow"
    cause = one(found, "fp16_overflow")
    assert cause.confidence == "likely"
    assert any("fell 5 times" in reason and "2048" in reason for reason in cause.because)
    assert any("63%" in reason for reason in cause.because)


@pytest.mark.parametrize(
    ("hardware", "word"), [(True, "this hardware can"), (False, "this hardware has no bf16"), (None, "if the hardware")]
)
def test_what_to_do_about_an_overflow_depends_on_the_hardware(hardware, word):
    """bf16 where the hardware has it, else fp32; never bf16 where it has not."""
    training = msgspec.structs.replace(HALF, hardware_bf16=hardware)
    advice = one(report(samples=calm(), training=training, evidence={"grad_norm": "inf"}), "fp16_overflow").advice
    assert word in advice[0] or word in advice[1]
    assert hardware is not False or not any("torch.bfloat16" in line for line in advice)


def test_fp16_autocast_without_a_scaler_is_told():
    """The advice names loss scaling where there is none, and not where there is."""
    bare = Training(dtypes={"float32": 1}, autocast="float16", loss_scaler="none")
    scaled = msgspec.structs.replace(bare, loss_scaler="GradScaler")
    assert any("GradScaler" in line for line in one(report(training=bare), "fp16_overflow").advice)
    assert not any("GradScaler around" in line for line in one(report(training=scaled), "fp16_overflow").advice)


def test_fp32_training_does_not_overflow_fp16():
    """Known to be computed in fp32: the rule is silent, whatever else there is."""
    assert "fp16_overflow" not in names(report(training=FULL, samples=calm(), last_good=good(60000.0)))


def test_headroom_alone_is_only_possible():
    """From outside of training nobody knows the dtype of the arithmetic."""
    assert one(report(step=1001, last_good=good(60000.0)), "fp16_overflow").confidence == "possible"


def test_growing_gradients_are_an_explosion():
    """A norm that climbs before the onset; the factor is told; fp32."""
    climb = tuple(Sample(1060 + n, 2.0, 0.7 * 3.0**n, None, 1e-3) for n in range(5))
    found = report(step=1065, samples=calm() + climb, training=FULL, evidence={"grad_norm": "nan"})
    assert names(found)[0] == "gradient_explosion"
    assert any("times its usual size" in reason for reason in likely_causes(found)[0].because)
    assert "gradient_explosion" not in names(report(samples=calm(), training=FULL, evidence={"grad_norm": "nan"}))


def test_an_explosion_while_warming_up_is_advised_about_the_warm_up():
    """A learning rate that still rises changes the advice."""
    rising = tuple(Sample(n, 2.0, 0.7 if n < 60 else 70.0, None, 1e-5 * n) for n in range(64))
    cause = one(report(step=64, samples=rising, training=FULL), "gradient_explosion")
    assert any("still rising" in reason for reason in cause.because)
    assert any("warm up more slowly" in line for line in cause.advice)


def test_a_spike_is_told_without_samples():
    """What the detector calls a spike is one."""
    assert names(report("spike", step=900, training=FULL))[0] == "gradient_explosion"


def test_eps_of_zero_in_fp16():
    """Weights poisoned behind finite signals: the first suspect is AdamW's eps, before an overflow."""
    found = report(
        "weights", step=2, samples=(Sample(1, 0.03, 0.2), Sample(2, 0.03, 0.2)), training=HALF, tensors=SPOILED
    )
    assert names(found)[0] == "eps_vanishes"
    assert one(found, "eps_vanishes").confidence == "likely"
    for changed in ({"eps": 1e-6}, {"optimizer": "SGD"}, {"dtypes": {"float32": 1}}):
        other = msgspec.structs.replace(HALF, **changed)
        assert "eps_vanishes" not in names(msgspec.structs.replace(found, details=Details(training=other)))


def test_eps_that_was_harmless_for_long_is_only_possible():
    """After a thousand good updates it is a possibility, no more."""
    assert one(report(samples=calm(), training=HALF), "eps_vanishes").confidence == "possible"


def test_eps_does_no_harm_in_updates_that_are_skipped():
    """A loss scale falls, and the weights are whole: nothing was divided by."""
    assert "eps_vanishes" not in names(report("loss_scale", step=9, training=HALF))
    assert "eps_vanishes" in names(report("loss_scale", step=9, training=HALF, tensors=SPOILED))


def test_a_masked_batch():
    """NaN loss, gradients of exactly zero, nothing harmed: likely; with spoiled weights it is not that."""
    masked = report("nan_loss", training=FULL, evidence={"loss": "nan", "grad_norm": 0.0})
    assert names(masked)[0] == "masked_batch"
    assert "bad_batch" not in names(masked)
    spoiled = report("weights", training=FULL, tensors=SPOILED, evidence={"loss": "nan", "grad_norm": 0.0})
    assert "masked_batch" not in names(spoiled)
    assert "masked_batch" not in names(report(evidence={"loss": "nan", "grad_norm": "nan"}))


def test_out_of_nowhere_is_a_bad_batch():
    """A steady norm up to the onset, in fp32: look at the batch, whose updates are named."""
    found = report(step=1062, onset=1060, samples=calm(), training=FULL, evidence={"grad_norm": "nan"})
    assert names(found) == ["bad_batch"]
    assert any("updates 1060 to 1062" in line for line in likely_causes(found)[0].advice)


def test_poisoned_buffers_say_that_the_step_was_skipped():
    """Only running statistics hold NaN: skipping the step did not protect them."""
    buffers = (SickTensor(name="bn.running_mean", kind="buffer"), SickTensor(name="w", kind="gradient"))
    cause = one(report("weights", training=FULL, tensors=buffers), "bad_batch")
    assert cause.confidence == "likely"
    assert any("only buffers" in reason for reason in cause.because)
    assert any("does not protect buffers" in line for line in cause.advice)


def test_a_damaged_checkpoint():
    """What digests and structure found is quoted."""
    bad = CheckpointFacts(path="c", step=1060, id="1060.1", outcome="bad", errors=(("digests", "w differs"),))
    found = report("bad", first_bad=bad)
    assert names(found)[0] == "damaged_file"
    assert any("w differs" in reason for reason in likely_causes(found)[0].because)


def test_a_scale_that_falls_to_its_floor_at_once_speaks_for_a_damaged_file():
    """The story of a damaged pretrained file: sick from the first update, and no scale is small enough."""
    samples = tuple(Sample(n, "nan", "nan", 32.0 / 2**n, 1e-5) for n in range(1, 6))
    found = report("loss_scale", step=5, onset=1, samples=samples, training=Training(loss_scaler="GradScaler"))
    assert one(found, "damaged_file").confidence == "likely"
    assert any("check_pretrained" in line for line in one(found, "damaged_file").advice)
    later = report("loss_scale", step=1064, onset=1060, samples=calm(scale=65536.0) + falling(16))
    assert "damaged_file" not in names(later)


def test_keys_that_did_not_match():
    """Missing and unexpected keys of the load, likely soon after it and possible later."""
    resumed = Resumed(step=1000, missing=("a.weight", "b.weight"), unexpected=("module.a.weight",))
    soon = one(report(resumed=resumed, training=FULL), "keys_do_not_match")
    assert (soon.confidence, len(soon.because)) == ("likely", 2)
    assert one(report(step=9000, resumed=resumed), "keys_do_not_match").confidence == "possible"


def test_an_optimizer_that_was_not_loaded():
    """Only the optimizer counts as a cause; what else was started from scratch is told with it."""
    resumed = Resumed(step=1000, anew=("optimizer", "scheduler"))
    cause = one(report(resumed=resumed), "optimizer_not_loaded")
    assert cause.confidence == "likely"
    assert "scheduler" in cause.because[0]
    assert "optimizer_not_loaded" not in names(report(resumed=Resumed(step=1000, anew=("rng",))))


@pytest.mark.parametrize(("saved", "now", "differs"), [(8, 4, True), (8, 8, False), (None, 4, False), (8, None, False)])
def test_another_number_of_ranks(saved, now, differs):
    """Told where both numbers are known and differ."""
    found = report(last_good=good(world_size=saved), training=Training(world_size=now))
    assert ("world_size_differs" in names(found)) is differs


def test_storage_trouble_is_no_sickness():
    """Nothing but storage is blamed."""
    assert names(report("storage", training=HALF)) == ["storage_failed"]


@pytest.mark.parametrize("cause", ["asked", "crash"])
def test_what_is_no_sickness_has_no_cause(cause):
    """Going back because somebody asked needs no explanation."""
    assert likely_causes(report(cause, training=HALF)) == ()


def test_without_evidence_nothing_is_claimed():
    """An empty report: not known, and only possible."""
    (cause,) = likely_causes(report("numeric", step=None, onset=None))
    assert (cause.name, cause.confidence) == ("unknown", "possible")


def test_causes_come_by_weight_and_claim_no_certainty():
    """Every weight is below 1, the order is descending, and the two words are all there is."""
    resumed = Resumed(step=1050, missing=("a",), anew=("optimizer",), world_size=2)
    everything = report(
        "loss_scale",
        step=1064,
        onset=1060,
        samples=calm(scale=65536.0) + falling(),
        training=msgspec.structs.replace(HALF, world_size=4),
        resumed=resumed,
        tensors=SPOILED,
        last_good=good(60000.0),
    )
    found = likely_causes(everything)
    weights = [c.weight for c in found]
    assert weights == sorted(weights, reverse=True)
    assert all(0 < w < 1 for w in weights)
    assert {c.confidence for c in found} <= {"likely", "possible"}
    assert all((c.weight >= 0.6) == (c.confidence == "likely") for c in found)
    assert all(c.because and c.advice for c in found)


def test_growth_needs_a_history():
    """No factor out of a handful of values, or above a median of zero."""
    assert growth([1.0] * 10) is None
    assert growth([0.0] * 40) is None
    assert growth([1.0] * 32 + [50.0]) == 50.0


def test_numbers_and_their_words():
    """What is not finite survives a record, and a word that is no number is none."""
    for value in (1.5, float("inf"), float("-inf"), None):
        assert number(worded(value)) == value
    assert number(worded(float("nan"))) != number(worded(float("nan")))
    assert number("many") is None


def test_clues_read_the_evidence_first():
    """What was written down when it was noticed beats the last sample."""
    found = CauseEvidence(report(samples=calm(), evidence={"loss": "nan", "grad_norm": True}))
    assert found.loss != found.loss
    assert found.grad_norm == pytest.approx(0.74)
