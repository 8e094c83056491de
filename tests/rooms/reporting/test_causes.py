"""The likely causes of an incident: each rule on the evidence that speaks for it, and on what speaks against it."""

import msgspec
import pytest

from ckptguard.reporting.causes import CauseEvidence, growth, likely_causes
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


BARE = Training(dtypes={"float32": 1}, autocast="float16", loss_scaler="none")
CLIMB = tuple(Sample(1060 + n, 2.0, 0.7 * 3.0**n, None, 1e-3) for n in range(5))
RISING = tuple(Sample(n, 2.0, 0.7 if n < 60 else 70.0, None, 1e-5 * n) for n in range(64))
BUFFERS = (SickTensor(name="bn.running_mean", kind="buffer"), SickTensor(name="w", kind="gradient"))
DAMAGED = CheckpointFacts(path="c", step=1060, id="1060.1", outcome="bad", errors=(("digests", "w differs"),))
FLOOR = tuple(Sample(n, "nan", "nan", 32.0 / 2**n, 1e-5) for n in range(1, 6))
KEYS = Resumed(step=1000, missing=("a.weight", "b.weight"), unexpected=("module.a.weight",))
NAN = {"grad_norm": "nan"}
# What is known; the cause, whether it is the first or the only one, how sure it is ("": not asked), and words of its
# reasons and of its advice.
CAUSES = {
    "a scale that falls, with little headroom": (
        report("loss_scale", step=1064, onset=1060, samples=calm(scale=65536.0) + falling(), training=HALF,
               last_good=good(41235.0)),
        "fp16_overflow", "first", "likely", ("fell 5 times", "to 2048", "63%"), (),
    ),
    "fp16 without a scaler": (report(training=BARE), "fp16_overflow", "", "", (), ("GradScaler",)),
    "headroom alone, from outside of training": (
        report(step=1001, last_good=good(60000.0)), "fp16_overflow", "", "possible", (), (),
    ),
    "growing gradients": (
        report(step=1065, samples=calm() + CLIMB, training=FULL, evidence=NAN),
        "gradient_explosion", "first", "", ("times its usual size",), (),
    ),
    "a learning rate that still rises": (
        report(step=64, samples=RISING, training=FULL),
        "gradient_explosion", "", "", ("still rising",), ("warm up more slowly",),
    ),
    "a spike, without samples": (
        report("spike", step=900, training=FULL), "gradient_explosion", "first", "", (), (),
    ),
    "an eps that was harmless for long": (
        report(samples=calm(), training=HALF), "eps_vanishes", "", "possible", (), (),
    ),
    "a falling scale, and poisoned weights": (
        report("loss_scale", step=9, training=HALF, tensors=SPOILED), "eps_vanishes", "", "", (), (),
    ),
    "out of nowhere": (
        report(step=1062, onset=1060, samples=calm(), training=FULL, evidence=NAN),
        "bad_batch", "only", "", (), ("updates 1060 to 1062",),
    ),
    "poisoned buffers alone": (
        report("weights", training=FULL, tensors=BUFFERS),
        "bad_batch", "", "likely", ("only buffers",), ("does not protect buffers",),
    ),
    "what digests found": (report("bad", first_bad=DAMAGED), "damaged_file", "first", "", ("w differs",), ()),
    "a scale at its floor at once": (
        report("loss_scale", step=5, onset=1, samples=FLOOR, training=Training(loss_scaler="GradScaler")),
        "damaged_file", "", "likely", (), ("check_pretrained",),
    ),
    "keys that did not match": (
        report(resumed=KEYS, training=FULL), "keys_do_not_match", "", "likely", ("missing", "unexpected"), (),
    ),
    "the same, long ago": (
        report(step=9000, resumed=KEYS), "keys_do_not_match", "", "possible", (), (),
    ),
    "an optimizer that was not loaded": (
        report(resumed=Resumed(step=1000, anew=("optimizer", "scheduler"))),
        "optimizer_not_loaded", "", "likely", ("scheduler",), (),
    ),
    "a full disk": (report("storage", training=HALF), "storage_failed", "only", "", (), ()),
    "nothing": (report("numeric", step=None, onset=None), "unknown", "only", "possible", (), ()),
}  # fmt: skip


@pytest.mark.parametrize("known", CAUSES)
def test_what_speaks_for_a_cause(known):
    """It is among them with its confidence, its reasons and what to do."""
    found, name, place, confidence, because, advice = CAUSES[known]
    assert not place or names(found)[0] == name
    assert place != "only" or len(names(found)) == 1
    cause = one(found, name)
    assert cause.confidence == confidence or not confidence
    for words, said in ((because, cause.because), (advice, cause.advice)):
        assert all(word in "\n".join(said) for word in words), said


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (report(training=FULL, samples=calm(), last_good=good(60000.0)), "fp16_overflow"),
        (report(samples=calm(), training=FULL, evidence=NAN), "gradient_explosion"),
        (report("loss_scale", step=9, training=HALF), "eps_vanishes"),  # nothing was divided by
        (report("loss_scale", step=1064, onset=1060, samples=calm(scale=65536.0) + falling(16)), "damaged_file"),
        (report(resumed=Resumed(step=1000, anew=("rng",))), "optimizer_not_loaded"),
    ],
)
def test_what_speaks_against_a_cause(found, name):
    """Computed in fp32, a steady norm, updates that were skipped, a late fall, another part that began from scratch."""
    assert name not in names(found)


def test_a_loss_scaler_that_is_there_is_not_advised():
    """GradScaler is named only where there is none."""
    scaled = msgspec.structs.replace(BARE, loss_scaler="GradScaler")
    assert not any("GradScaler" in line for line in one(report(training=scaled), "fp16_overflow").advice)


@pytest.mark.parametrize("cause", ["asked", "crash"])
def test_what_is_no_sickness_has_no_cause(cause):
    """Going back because somebody asked needs no explanation."""
    assert likely_causes(report(cause, training=HALF)) == ()


@pytest.mark.parametrize(
    ("hardware", "word"), [(True, "this hardware can"), (False, "this hardware has no bf16"), (None, "if the hardware")]
)
def test_what_to_do_about_an_overflow_depends_on_the_hardware(hardware, word):
    """bf16 where the hardware has it, else fp32; never bf16 where it has not."""
    training = msgspec.structs.replace(HALF, hardware_bf16=hardware)
    advice = one(report(samples=calm(), training=training, evidence={"grad_norm": "inf"}), "fp16_overflow").advice
    assert word in advice[0] or word in advice[1]
    assert hardware is not False or not any("torch.bfloat16" in line for line in advice)


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


def test_a_masked_batch():
    """NaN loss, gradients of exactly zero, nothing harmed: likely; with spoiled weights it is not that."""
    masked = report("nan_loss", training=FULL, evidence={"loss": "nan", "grad_norm": 0.0})
    assert names(masked)[0] == "masked_batch"
    assert "bad_batch" not in names(masked)
    spoiled = report("weights", training=FULL, tensors=SPOILED, evidence={"loss": "nan", "grad_norm": 0.0})
    assert "masked_batch" not in names(spoiled)
    assert "masked_batch" not in names(report(evidence={"loss": "nan", "grad_norm": "nan"}))


@pytest.mark.parametrize(("saved", "now", "differs"), [(8, 4, True), (8, 8, False), (None, 4, False), (8, None, False)])
def test_another_number_of_ranks(saved, now, differs):
    """Told where both numbers are known and differ."""
    found = report(last_good=good(world_size=saved), training=Training(world_size=now))
    assert ("world_size_differs" in names(found)) is differs


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
