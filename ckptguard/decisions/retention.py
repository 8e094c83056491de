"""Decide which checkpoints stay, and why. Pure: each decision carries its reasons, as in restic.

Rules of every policy:
- Only GOOD checkpoints occupy a slot, and the newest `keep_good` of each series that were not thinned stay.
- Nothing older than a checkpoint without a verdict is removed, because that verdict may be bad.
- Of a save of several checkpoints all good ones stay, or none.
- Pinned, used and linked checkpoints stay. So does a checkpoint without a step: nothing says what is newer.
- BAD, INCOMPLETE and SUSPECT checkpoints stay unless the policy drops them. They occupy no good one's slot, they are
  evidence, and some can be repaired or cleared.
- A missing, NaN or infinite metric is never the best. A metric that no GOOD checkpoint of a series has keeps nothing
  there. Its name may be mistyped, nothing was evaluated yet, or other files hold the numbers.
- A wrong clock removes nothing early: see `ages`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

import msgspec

from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy, span_text
from ckptguard.values.verdict import Outcome


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint at its own path.

    `saved` is in seconds since 1970 by the writer's clock. `holds` are reasons to keep it under any policy. `changed`:
    its files are not those of its verdict, so its outcome is PENDING.
    """

    path: str
    id: CheckpointId
    outcome: Outcome
    saved: float | None = None
    metrics: Mapping[str, float] = {}
    bytes: int = 0
    holds: tuple[str, ...] = ()
    changed: bool = False
    thinned: bool = False  # it holds no state that only a resume needs


class RetentionDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a checkpoint stays: every reason to keep it, or the one reason to remove it."""

    checkpoint: Present
    keep: bool
    reasons: tuple[str, ...]


def decide(
    checkpoints: Sequence[Present],
    policy: Policy,
    *,
    now: float | None = None,
    saves: Iterable[Collection[CheckpointId]] = (),
) -> list[RetentionDecision]:
    """Return a decision for every checkpoint, ordered by series and step. `now` is in seconds since 1970 by our clock.

    Of each of the `saves` of several checkpoints all good ones stay if one does.
    """
    by_series: dict[str, list[Present]] = {}
    for checkpoint in checkpoints:
        by_series.setdefault(checkpoint.id.series, []).append(checkpoint)
    decisions = [d for _, one in sorted(by_series.items()) for d in _decide_series(one, policy, now)]
    by_id = {d.checkpoint.id: d for d in decisions}
    for save in saves:
        own = [by_id[id] for id in save if id in by_id and by_id[id].checkpoint.outcome is Outcome.GOOD]
        stays = next((one for one in own if one.keep), None)
        for one in own:
            if stays is not None and not one.keep:
                why = (f"part of the save of {stays.checkpoint.path}",)
                by_id[one.checkpoint.id] = msgspec.structs.replace(one, keep=True, reasons=why)
    return [d if d.keep else by_id[d.checkpoint.id] for d in decisions]


def unknown_metrics(checkpoints: Sequence[Present], policy: Policy) -> list[str]:
    """Return the metrics of `policy` that no GOOD checkpoint has."""
    known = {name for c in checkpoints if c.outcome is Outcome.GOOD for name in c.metrics}
    return [best.metric for best in policy.keep_best if best.metric not in known]


def ages(times: Sequence[float | None], now: float | None) -> list[float | None]:
    """Return the age of each checkpoint in seconds, and never too much. `times` are their save times, oldest step
    first.

    An age ends at the newest time, or at `now` if that is earlier. The largest gap in between counts as nothing,
    because the clock may have jumped. None: the time is unknown, or a later step has an earlier time.
    """
    known = [(place, time) for place, time in enumerate(times) if time is not None]
    unsure = max((place for (_, time), (place, later) in itertools.pairwise(known) if time > later), default=-1)
    found: list[float | None] = [None] * len(times)
    newest = later = known[-1][1] if known else 0.0
    greatest = 0.0
    for place, time in reversed([(place, time) for place, time in known if place > unsure]):
        greatest, later = max(greatest, later - time), time
        found[place] = max(0.0, min(newest - greatest, math.inf if now is None else now) - time)
    return found


def may_be_thinned(decisions: Sequence[RetentionDecision], policy: Policy) -> list[Present]:
    """Return the checkpoints that the policy thins, of those that stay: GOOD, older than the newest `thin_after` that
    are good and whole, and nothing holds them. As for a removal, none with a newer one without a verdict is."""
    if policy.thin_after is None:
        return []
    by_series: dict[str, list[Present]] = {}
    for decision in decisions:
        by_series.setdefault(decision.checkpoint.id.series, []).append(decision.checkpoint)
    staying = {d.checkpoint.path for d in decisions if d.keep}
    found = []
    for own in by_series.values():
        ordered = sorted(own, key=lambda c: (c.id.order, c.path), reverse=True)
        pending = [c for c in ordered if c.outcome is Outcome.PENDING]
        if any(c.id.step is None for c in pending):
            continue  # it may be newer than anything
        full = _full([c for c in ordered if c.outcome is Outcome.GOOD and c.path in staying])
        for one in full[max(policy.thin_after, policy.keep_good) :]:
            judged = all(one.id.order > other.id.order for other in pending)
            if one.id.step is not None and not one.holds and judged:
                found.append(one)
    return found


def _full(good: Sequence[Present]) -> list[Present]:
    return [checkpoint for checkpoint in good if not checkpoint.thinned]


def _decide_series(own: Sequence[Present], policy: Policy, now: float | None) -> list[RetentionDecision]:
    unknown = unknown_metrics(own, policy)
    policy = msgspec.structs.replace(policy, keep_best=tuple(b for b in policy.keep_best if b.metric not in unknown))
    ordered = sorted(own, key=lambda c: (c.id.order, c.path))
    good = [c for c in reversed(ordered) if c.outcome is Outcome.GOOD]
    reasons: dict[str, list[str]] = {c.path: list(c.holds) for c in ordered}
    for checkpoint, reason in _kept_by_rules(ordered, good, policy, now):
        reasons[checkpoint.path].append(reason)
    pending = [i for i, c in enumerate(ordered) if c.outcome is Outcome.PENDING]
    nameless = [ordered[i] for i in pending if ordered[i].id.step is None]  # may be newer than anything
    decisions = []
    for index, checkpoint in enumerate(ordered):
        why = reasons[checkpoint.path]
        stays = _stays_anyway(checkpoint, policy, good)
        if stays is not None:
            why.append(stays)
        if pending and index < pending[-1]:
            last = ordered[pending[-1]]
            why.append(f"{last.path} is newer and {_undecided(last)}")
        elif nameless and checkpoint.id.step is not None:
            why.append(f"{nameless[0].path} may be newer and {_undecided(nameless[0])}")
        why_not = "no rule keeps it" if checkpoint.outcome is Outcome.GOOD else f"it is {checkpoint.outcome.value}"
        decisions.append(RetentionDecision(checkpoint=checkpoint, keep=bool(why), reasons=tuple(why) or (why_not,)))
    return decisions


def _undecided(checkpoint: Present) -> str:
    """What is said of a checkpoint that is PENDING."""
    return "has changed since its verdict" if checkpoint.changed else "has no verdict yet"


def _stays_anyway(checkpoint: Present, policy: Policy, good: Sequence[Present]) -> str | None:
    """Return why a checkpoint stays before any rule applies, or None."""
    if checkpoint.id.step is None:
        return "its step is not known"
    if checkpoint.outcome is Outcome.PENDING:
        return f"it {_undecided(checkpoint)}"
    if checkpoint.outcome is Outcome.GOOD:
        return None if policy.has_rules else "no rule says what may go"
    if not policy.drop_failed:
        return f"it is {checkpoint.outcome.value}, which no rule counts"
    newer = sum(c.id.order > checkpoint.id.order for c in _full(good)[: policy.keep_good])
    if newer < policy.keep_good:
        return f"it is {checkpoint.outcome.value}, and fewer than {policy.keep_good} good ones are newer"
    return None


def _kept_by_rules(
    ordered: Sequence[Present], good: Sequence[Present], policy: Policy, now: float | None
) -> Iterator[tuple[Present, str]]:
    """Yield each GOOD checkpoint that a rule keeps, and why. `good` is newest first."""
    for checkpoint in _full(good)[: policy.keep_good]:
        yield checkpoint, f"one of the newest {policy.keep_good} good ones"
    for checkpoint in good[: policy.keep_last or 0]:
        yield checkpoint, f"one of the last {policy.keep_last}"
    if policy.keep_every is not None:
        first = {(c.id.number or 0) // policy.keep_every: c for c in good}  # the last one assigned is the oldest
        for checkpoint in first.values():
            yield checkpoint, f"the first of {policy.keep_every} steps"
    if policy.keep_within is not None:
        numbered = [c for c in ordered if c.id.step is not None]
        for checkpoint, age in zip(numbered, ages([c.saved for c in numbered], now), strict=True):
            if checkpoint.outcome is Outcome.GOOD and (age is None or age <= policy.keep_within):
                yield checkpoint, "its time is not known" if age is None else f"within {span_text(policy.keep_within)}"
    for best in policy.keep_best:
        ranked = [(c.metrics[best.metric], c) for c in good if math.isfinite(c.metrics.get(best.metric, math.nan))]
        ranked.sort(key=itemgetter(0), reverse=best.way == "max")  # stable: of equals the newer is first
        for value, checkpoint in ranked[: best.count]:
            yield checkpoint, f"one of the best {best.count} by {best.metric} ({best.way}): {value:g}"
