"""The laws of retention, over all sorts of checkpoints and policies."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.decisions.retention import Present, ages, decide
from ckptguard.errors import SettingsError
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Best, Policy, parse_best, parse_span, span_text
from ckptguard.values.verdict import Outcome

YEAR = 365 * 86400.0
HOUR = 3600.0
metrics = st.dictionaries(st.sampled_from(["loss", "acc"]), st.floats(), max_size=2)


@st.composite
def runs(draw, outcomes=tuple(Outcome)):
    """Some checkpoints of two series, under paths of their own."""
    keys = draw(
        st.lists(
            st.tuples(st.sampled_from("ab"), st.none() | st.integers(0, 40), st.integers(1, 2)),
            max_size=24,
            unique=True,
        )
    )
    return [
        Present(
            path=f"{series}/{number}",
            id=CheckpointId(series, step, generation),
            outcome=draw(st.sampled_from(outcomes)),
            saved=draw(st.none() | st.floats(0, 3 * YEAR)),
            metrics=draw(metrics),
            holds=draw(st.sampled_from([(), (), (), ("pinned",), ("in use",)])),
        )
        for number, (series, step, generation) in enumerate(keys)
    ]


policies = st.builds(
    Policy,
    keep_last=st.none() | st.integers(1, 6),
    keep_every=st.none() | st.integers(1, 12),
    keep_within=st.none() | st.floats(1, YEAR),
    keep_best=st.lists(
        st.builds(Best, st.sampled_from(["loss", "acc"]), st.sampled_from(["min", "max"]), st.integers(1, 3)),
        max_size=2,
    ).map(tuple),
    keep_good=st.integers(1, 4),
    drop_failed=st.booleans(),
)
clocks = st.none() | st.floats(0, 4 * YEAR)


def age(checkpoint):
    """What tells the newer one of a series."""
    return checkpoint.id.order


def good_of(checkpoints, series):
    """GOOD checkpoints of a series that have a step, newest first."""
    found = [c for c in checkpoints if c.id.series == series and c.outcome is Outcome.GOOD and c.id.step is not None]
    return sorted(found, key=age, reverse=True)


@given(runs(), policies, clocks)
def test_what_never_may_be_removed_stays(checkpoints, policy, now):
    """Every checkpoint gets one decision with a reason; the newest good ones, pending ones, older ones than a pending
    one, held ones and those without a step are never removed; of the others only GOOD ones unless failed ones are
    asked for, and nothing at all by an empty policy."""
    decisions = decide(checkpoints, policy, now=now)
    assert sorted(d.checkpoint.path for d in decisions) == sorted(c.path for c in checkpoints)
    assert all(d.reasons and all(d.reasons) for d in decisions)
    for removed in (d.checkpoint for d in decisions if not d.keep):
        good = good_of(checkpoints, removed.id.series)
        assert removed not in good[: policy.keep_good]
        assert len([c for c in good if age(c) > age(removed)]) >= policy.keep_good
        assert not removed.holds
        assert removed.id.step is not None
        assert removed.outcome is not Outcome.PENDING
        assert not policy.asks_nothing
        assert removed.outcome is not Outcome.GOOD or policy.has_rules
        assert removed.outcome is Outcome.GOOD or policy.drop_failed
        pending = [c for c in checkpoints if c.id.series == removed.id.series and c.outcome is Outcome.PENDING]
        assert not any(c.id.step is None or age(c) > age(removed) for c in pending)


@given(runs(), policies, clocks)
def test_only_good_ones_occupy_a_slot(checkpoints, policy, now):
    """Taking away what is BAD, INCOMPLETE or SUSPECT changes the decision about no good one. (keep_within measures by
    all there are: it is left out.)"""
    policy = Policy(keep_last=policy.keep_last, keep_every=policy.keep_every, keep_best=policy.keep_best)
    counted = [c for c in checkpoints if c.outcome in (Outcome.GOOD, Outcome.PENDING)]
    before = {d.checkpoint.path: d for d in decide(checkpoints, policy, now=now)}
    for decision in decide(counted, policy, now=now):
        assert before[decision.checkpoint.path] == decision


@given(runs(), policies, clocks)
def test_every_rule_keeps_what_it_names(checkpoints, policy, now):
    """The newest n, one of every n steps, and the best n by a metric that is a number stay."""
    kept = {d.checkpoint.path for d in decide(checkpoints, policy, now=now) if d.keep}
    for series in "ab":
        good = good_of(checkpoints, series)
        assert {c.path for c in good[: policy.keep_last or 0]} <= kept
        if policy.keep_every is not None:
            parts = {c.id.step // policy.keep_every for c in good}
            assert parts == {c.id.step // policy.keep_every for c in good if c.path in kept}
        for best in policy.keep_best:
            values = {c.path: c.metrics.get(best.metric, math.nan) for c in good}
            finite = sorted((v for v in values.values() if math.isfinite(v)), reverse=best.way == "max")
            winners = sorted(
                (v for p, v in values.items() if p in kept and math.isfinite(v)), reverse=best.way == "max"
            )
            assert winners[: best.count] == finite[: best.count]


@given(runs(), st.sampled_from(["min", "max"]), st.integers(1, 3))
def test_what_is_no_number_never_is_the_best(checkpoints, way, count):
    """NaN, infinity and absence win nothing, and take nobody's place."""
    decisions = decide(checkpoints, Policy(keep_best=(Best("loss", way, count),), keep_good=1))
    for decision in decisions:
        if any("best" in reason for reason in decision.reasons):
            assert math.isfinite(decision.checkpoint.metrics["loss"])


def test_a_metric_that_nobody_has_removes_nothing():
    """A mistyped name is no reason to take the best away; other rules hold as ever."""
    own = [
        Present(path=f"{i}", id=CheckpointId("a", i, 1), outcome=Outcome.GOOD, metrics={"eval_loss": i})
        for i in range(9)
    ]
    typo = Best("evalloss", "min")
    assert all(d.keep for d in decide(own, Policy(keep_best=(typo,))))
    kept = [d.checkpoint.id.step for d in decide(own, Policy(keep_best=(typo, Best("eval_loss", "min")))) if d.keep]
    assert kept == [0, 7, 8]
    assert [d.checkpoint.id.step for d in decide(own, Policy(keep_best=(typo,), keep_last=3)) if d.keep] == [6, 7, 8]
    bare = [Present(path=f"b{i}", id=CheckpointId("b", i, 1), outcome=Outcome.GOOD) for i in range(9)]
    kept = [d.checkpoint.path for d in decide([*own, *bare], Policy(keep_best=(Best("eval_loss", "min"),))) if d.keep]
    assert kept == ["0", "7", "8", *(c.path for c in bare)]


@given(runs(outcomes=(Outcome.GOOD,)), policies)
def test_what_stayed_stays(checkpoints, policy):
    """Asked again about what is left, the same policy removes nothing more."""
    left = [d.checkpoint for d in decide(checkpoints, policy) if d.keep]
    assert all(d.keep for d in decide(left, policy))


@given(runs(), policies, clocks, st.randoms())
def test_the_order_of_a_listing_changes_nothing(checkpoints, policy, now, random):
    """Decisions do not depend on the order in which checkpoints were found."""
    shuffled = list(checkpoints)
    random.shuffle(shuffled)
    assert decide(shuffled, policy, now=now) == decide(checkpoints, policy, now=now)


def wrong_clock(true, kind, at):
    """What a clock shows at these true times that goes wrong at one of them."""
    shown = {
        "right": lambda i, t: t,
        "ahead": lambda i, t: t + YEAR * (i >= at),
        "back": lambda i, t: t - YEAR * (i >= at),
        "ahead, then mended": lambda i, t: t + YEAR * (at <= i < at + 3),
        "back, then mended": lambda i, t: t - YEAR * (at <= i < at + 3),
        "frozen": lambda i, t: true[min(i, at)],
        "frozen, then mended": lambda i, t: true[at] if at <= i < at + 3 else t,
    }[kind]
    return [shown(i, t) for i, t in enumerate(true)]


KINDS = ["right", "ahead", "back", "ahead, then mended", "back, then mended", "frozen", "frozen, then mended"]


@given(
    st.lists(st.floats(1, 30 * HOUR), min_size=2, max_size=40),
    st.sampled_from(KINDS),
    st.integers(0, 39),
    st.floats(HOUR, 40 * HOUR),
)
def test_a_wrong_clock_removes_nothing_early(gaps, kind, at, within):
    """Whatever the clock did that wrote the times (and tells the time now), only what truly is older goes."""
    true = [sum(gaps[: i + 1]) + 2 * YEAR for i in range(len(gaps))]
    shown = wrong_clock(true, kind, min(at, len(true) - 1))
    *saved, now = shown
    checkpoints = [
        Present(path=f"{i}", id=CheckpointId("a", i, 1), outcome=Outcome.GOOD, saved=time)
        for i, time in enumerate(saved)
    ]
    for decision in decide(checkpoints, Policy(keep_within=within, keep_good=1), now=now):
        if not decision.keep:
            assert true[-1] - true[decision.checkpoint.id.step] > within - 1


@given(st.lists(st.floats(1, HOUR), min_size=1, max_size=30), st.sampled_from([-YEAR, YEAR]), st.floats(60, 20 * HOUR))
def test_our_own_clock_alone_removes_nothing_early(gaps, off, within):
    """Where only the clock of the one who decides is wrong, the others' times count."""
    true = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    found = ages(true, true[-1] + off)
    assert all(a is not None and a <= true[-1] - t + 1e-3 for a, t in zip(found, true, strict=True))


def test_times_that_do_not_rise_tell_no_age():
    """What was sealed anew long after, or by a clock that went back, leaves open how old anything up to it is."""
    assert ages([0.0, 10.0, 20.0, 30.0], 40.0) == [20.0, 10.0, 0.0, 0.0]
    assert ages([0.0, 99.0, 20.0, 30.0, 40.0], 50.0) == [None, None, None, 0.0, 0.0]
    assert ages([None, 10.0, None, 10.0], None) == [None, 0.0, None, 0.0]
    assert ages([3.0, 2.0], 9.0) == [None, None]


def test_a_right_clock_keeps_hardly_more_than_asked():
    """With a save an hour and a right clock, two days are 48 checkpoints, and one more for the greatest gap."""
    checkpoints = [
        Present(path=f"{i}", id=CheckpointId("a", i, 1), outcome=Outcome.GOOD, saved=i * HOUR) for i in range(100)
    ]
    kept = [d for d in decide(checkpoints, Policy(keep_within=48 * HOUR), now=100 * HOUR) if d.keep]
    assert len(kept) == 50


def test_many_checkpoints_are_decided_at_once():
    """Ten thousand with every rule at once; nothing is looked at again and again."""
    checkpoints = [
        Present(path=f"{i}", id=CheckpointId("a", i, 1), outcome=Outcome.GOOD, saved=i * 60.0, metrics={"loss": -i})
        for i in range(10_000)
    ]
    policy = Policy(keep_last=5, keep_every=1000, keep_within=600.0, keep_best=(Best("loss", "max"),))
    kept = [d.checkpoint.id.step for d in decide(checkpoints, policy, now=600_000.0) if d.keep]
    assert kept == [*range(0, 10_000, 1000), *range(9988, 10_000)]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2d", 172800), ("1d12h", 129600), ("30m", 1800), ("1.5h", 5400), ("90", 90), (90, 90), ("1w", 604800), ("0", 0)],
)
def test_spans_of_time_are_read(text, seconds):
    """Units may be combined; a bare number is seconds."""
    assert parse_span(text) == seconds


@given(st.integers(1, 10**8))
def test_spans_of_time_are_written_as_they_are_read(seconds):
    """The text of a span is read as the same span."""
    assert parse_span(span_text(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "2x", "d", "-1", "nan", "inf", "1d-2h", "\u0661d"])
def test_what_is_no_span_of_time_is_refused(text):
    """Anything else is one clear sentence."""
    with pytest.raises(SettingsError, match="time span"):
        parse_span(text)


def test_metrics_may_have_any_name():
    """The name ends before the last colons."""
    assert parse_best("eval/loss:min") == Best("eval/loss", "min", 1)
    assert parse_best("a:min:max:3") == Best("a:min", "max", 3)
    for text in ("loss", "loss:least", "loss:min:0", ":min", "loss:min:"):
        with pytest.raises(SettingsError, match="METRIC"):
            parse_best(text)


@pytest.mark.parametrize("rule", [{"keep_last": 0}, {"keep_every": -1}, {"keep_good": 0}, {"keep_within": 0.0}])
def test_rules_that_make_no_sense_are_refused(rule):
    """A rule of nothing would read as "remove everything"."""
    with pytest.raises(SettingsError):
        Policy(**rule)
