"""Stale: nothing that updates change has changed since the step before."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.evidence import T, evidence, found_by, manifest

from ckptguard.checks import Evidence, facts_of
from ckptguard.formats.structure import Leaf
from ckptguard.values.verdict import Facts, Finding, Severity

WEIGHT = T("w", "w1")
MOMENT = T("state.0.exp_avg", "m1", role="optimizer")
STEP = T("state.0.step", "s1", role="optimizer", shape=())
MEAN = T("bn.running_mean", "r1")
SEEN = T("bn.num_batches_tracked", "n1", shape=(), dtype="int64")
BOTH = {"model.safetensors": [WEIGHT, MEAN, SEEN], "optimizer.pt": [MOMENT, STEP]}
ALONE = {"model.safetensors": [WEIGHT, MEAN, SEEN]}


def later(files: dict[str, list[T]], **changed: str) -> dict[str, list[T]]:
    """The same tensors, with other bytes for some: of the forward pass and the counters always."""
    forward = {"bn.running_mean": "r2", "bn.num_batches_tracked": "n2", "state.0.step": "s2", **changed}
    return {f: [t._replace(digest=forward.get(t.name, t.digest)) for t in ts] for f, ts in files.items()}


def stale(given: Evidence) -> list[tuple[Severity, str]]:
    return [(f.severity, f.message) for f in found_by("stale", given)]


def one(given: Evidence) -> Finding:
    [finding] = found_by("stale", given)
    return finding


def test_alone_it_is_a_notice() -> None:
    """Only running statistics and counters went on."""
    finding = one(evidence(later(BOTH), previous=manifest(BOTH)))
    assert finding.severity is Severity.NOTICE
    assert "no weight and no optimizer moment changed since ckpt-1" in finding.message
    assert facts_of(evidence(later(BOTH), previous=manifest(BOTH))).stale


@pytest.mark.parametrize("changed", ["w", "state.0.exp_avg"])
def test_one_changed_weight_or_moment_is_training(changed: str) -> None:
    """A learning rate of 0 moves moments alone."""
    assert stale(evidence(later(BOTH, **{changed: "x"}), previous=manifest(BOTH))) == []


def test_without_a_previous_step_nothing_is_said() -> None:
    """The first save of a series, and a step without number."""
    assert stale(evidence(BOTH)) == []
    assert not facts_of(evidence(BOTH)).stale


def test_appearing_and_vanishing_tensors_are_changes() -> None:
    """Moments appear with the first update."""
    assert stale(evidence(later(BOTH), previous=manifest(ALONE))) == []
    assert stale(evidence(later(ALONE), previous=manifest(BOTH))) == []


def test_a_second_time_counts_only_with_moments() -> None:
    """Weights alone rest in a warm-up from a learning rate of 0, and in frozen modules."""
    before = Facts(stale=True)
    assert one(evidence(later(BOTH), previous=manifest(BOTH), previous_facts=before)).severity is Severity.SICKNESS
    assert one(evidence(later(ALONE), previous=manifest(ALONE), previous_facts=before)).severity is Severity.NOTICE
    assert not facts_of(evidence(later(ALONE), previous=manifest(ALONE))).stale
    masters = {"o.pt": [T("single_partition_of_fp32_groups.0", "p", role="optimizer"), STEP]}
    assert not facts_of(evidence(later(masters), previous=manifest(masters))).stale


REASONS: dict[str, tuple[dict[str, list[Leaf]], Facts | None]] = {
    "skipped": ({"states.pt": [Leaf("skipped_steps", 5)]}, Facts(skipped_steps=3)),
    "deepspeed floor": (
        {"o.pt": [Leaf("l.cur_scale", 1.0), Leaf("l.min_scale", 1), Leaf("l.scale_window", 1000)]},
        None,
    ),
    "fused floor": ({"o.pt": [Leaf("cur_scale", 1.0), Leaf("scale_window", 1000)]}, None),
    "torch floor": ({"scaler.pt": [Leaf("scale", 0.5), Leaf("backoff_factor", 0.5)]}, None),
    "gradient": ({"trainer_state.json": [Leaf("log_history.-1.grad_norm", math.nan)]}, None),
}
HEALTHY: dict[str, tuple[dict[str, list[Leaf]], Facts | None]] = {
    "skipped before": ({"states.pt": [Leaf("skipped_steps", 3)]}, Facts(skipped_steps=3)),
    "skipped, nothing to compare with": ({"states.pt": [Leaf("skipped_steps", 3)]}, Facts()),
    "static scale": ({"o.pt": [Leaf("l.cur_scale", 1.0), Leaf("l.dynamic", False)]}, None),
    "high scale": ({"scaler.pt": [Leaf("scale", 65536.0), Leaf("backoff_factor", 0.5)]}, None),
    "somebody's scale": ({"x.pt": [Leaf("head.scale", 1.0)]}, None),
    "gradient": ({"trainer_state.json": [Leaf("log_history.-1.grad_norm", 0.3)]}, None),
    "another norm": ({"trainer_state.json": [Leaf("log_history.-1.other", math.inf)]}, None),
}


@pytest.mark.parametrize("kind", sorted(REASONS))
def test_evidence_of_left_out_updates_is_sickness(kind: str) -> None:
    """Each of them says why nothing changed; without staleness none says anything."""
    leaves, facts = REASONS[kind]
    given: dict[str, Any] = {"previous": manifest(BOTH), "previous_facts": facts, "leaves": leaves}
    assert one(evidence(later(BOTH), **given)).severity is Severity.SICKNESS
    assert stale(evidence(later(BOTH, w="x"), **given)) == []


@pytest.mark.parametrize("kind", sorted(HEALTHY))
def test_ordinary_numbers_are_no_evidence(kind: str) -> None:
    """A static scale of 1 is how bf16 trains."""
    leaves, facts = HEALTHY[kind]
    given: dict[str, Any] = {"previous": manifest(BOTH), "previous_facts": facts, "leaves": leaves}
    assert one(evidence(later(BOTH), **given)).severity is Severity.NOTICE


def test_the_count_of_skipped_steps_is_kept_for_the_next_step() -> None:
    """The largest of all ranks; nonsense counts as none."""
    leaves = {"a.pt": [Leaf("skipped_steps", 2)], "b.pt": [Leaf("skipped_steps", 4), Leaf("x.skipped_steps", 9)]}
    assert facts_of(evidence(BOTH, leaves=leaves)).skipped_steps == 4
    assert facts_of(evidence(BOTH, leaves={"a.pt": [Leaf("skipped_steps", -1)]})).skipped_steps is None


def test_shards_cut_anew_and_renamed_files_are_the_same_content() -> None:
    """Names of files state steps."""
    before = {"net-1.pt": [WEIGHT, T("v", "v1")]}
    now = {"net-2-a.pt": [T("v", "v1")], "net-2-b.pt": [WEIGHT]}
    assert len(stale(evidence(now, previous=manifest(before)))) == 1
    swapped = {"net-2-a.pt": [T("v", "w1")], "net-2-b.pt": [WEIGHT._replace(digest="v1")]}
    assert stale(evidence(swapped, previous=manifest(before))) == []
