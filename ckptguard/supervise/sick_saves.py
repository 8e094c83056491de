"""Which saves of a run are sick: training is at fault, not storage. From the records; reads no tensor bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from ckptguard.decisions.restarts import is_far_before
from ckptguard.decisions.rollback_plan import Content
from ckptguard.errors import CouldNotTellError
from ckptguard.layouts import Checkpoint
from ckptguard.recover.rollback_scope import content_lying, content_of
from ckptguard.runs.find_known_good import Wanted, folder_of, newest_candidate
from ckptguard.runs.run_view import RunView
from ckptguard.runs.trainer_log import sick_since
from ckptguard.values.ids import Step, numbers_of
from ckptguard.values.verdict import Finding, Outcome, Severity, Verdict

_DAMAGE = frozenset(("digests", "structure"))  # with these, a NaN may be what became of good bytes


class SickSave(msgspec.Struct, frozen=True, kw_only=True):
    """The newest saves of a series are sick; `path` is the newest of them. `since`: the step from which on the run's
    log says so, where it does (earlier checkpoints only are worth going back to). `stale`: all that is wrong is that
    nothing changed. `anew`: it is healthy, but training that should have gone on began from scratch."""

    path: str
    series: str
    step: Step
    reason: str
    since: int | None = None
    stale: bool = False
    anew: bool = False

    @property
    def folder(self) -> str:
        """Where it was saved."""
        return folder_of(self.path)


def sickness_in(verdict: Verdict) -> Finding | None:
    """Why training, and not storage, is at fault for a verdict; None if it is not, or if that cannot be known."""
    errors = [f for f in verdict.findings if f.severity is Severity.ERROR]
    if verdict.place_damaged or any(f.check in _DAMAGE for f in errors):
        return None
    # A model of zeros is an error of the same check, but without a count: storage makes such files too.
    numbers = [f for f in errors if f.check == "finite" and f.count]
    # Of check "incident" is what people or guards marked: they have acted on it already. "schema" is but a question,
    # and "structure" a doubt about how the file was written.
    said = [f for f in verdict.findings if f.severity is Severity.SICKNESS]
    others = [f for f in said if f.check not in ("incident", "schema", "structure")]
    return next(iter((*numbers, *others)), None)


def find_sick_saves(view: RunView, *, before: Iterable[object] = ()) -> list[SickSave]:
    """The series whose newest judged save in place is sick, and that there is reason to go back for.

    The newest is told by the order of saving; among what lay there `before` (signatures) by its numbers, for copying a
    run gives new times. There is reason if the series has a known-good checkpoint. If the whole run has none, or if it
    is of a kind that training resumes from, what was saved since `before` is one too; a dump of activations is none.
    """
    old = frozenset(before)
    any_good = newest_candidate(view) is not None
    found = []
    for series in dict.fromkeys(c.series for c in view.checkpoints):
        own = [c for c in view.checkpoints if c.series == series]
        newest = sorted(own, key=lambda c: (c.signature not in old, _written(c, old), numbers_of(c.step)), reverse=True)
        sick = _newest_sick(view, newest)
        if sick is not None and _is_reason(view, *sick, is_new=sick[0].signature not in old, any_good=any_good):
            found.append(sick[1])
    return found


def find_begun_anew(view: RunView, went_back_to: Content, lying: Collection[object]) -> tuple[bool, SickSave | None]:
    """Whether anything can be told of the first save after a restart, when other files were `lying` there (signatures);
    and that save, if training began from scratch instead of going on from what it went back to."""
    folder = folder_of(went_back_to.path)
    new = [c for c in view.checkpoints if folder_of(c.path) == folder and c.signature not in lying]
    contents = [(content_lying(view, c), c) for c in new]
    for content, checkpoint in sorted(contents, key=lambda pair: (pair[0].saved_at or 0, pair[0].path)):
        kind = is_far_before(content.counters, went_back_to.counters)
        if kind is not None:
            here, there = content.counters[kind], went_back_to.counters[kind]
            reason = f"training began anew: {kind} is {here}, and it should have gone on from {there}"
            path, series, step = checkpoint.path, checkpoint.series, checkpoint.step
            return True, SickSave(path=path, series=series, step=step, reason=reason, anew=True)
        return bool(content.counters), None  # without any, nothing is known of it yet
    return False, None


def _written(checkpoint: Checkpoint, old: Collection[object]) -> int:
    """When something new was written, by the storage's clock."""
    times = [e.mtime_ns for e in checkpoint.entries if e.mtime_ns is not None]
    return max(times, default=0) if checkpoint.signature not in old else 0


def _is_reason(view: RunView, checkpoint: Checkpoint, sick: SickSave, *, is_new: bool, any_good: bool) -> bool:
    if any_good and newest_candidate(view, Wanted(series=sick.series)) is not None:
        return True
    if not any_good or not is_new:
        return is_new and not any_good
    content, history = content_lying(view, checkpoint), view.history
    if content.has_optimizer or any(history.was_good(id) for id in history.standings(sick.series)):
        return True
    beside = {c.series for c in view.checkpoints if folder_of(c.path) == sick.folder}
    good = (newest_candidate(view, Wanted(series=series)) for series in beside)
    return content.shape is not None and any(content_of(c).shape == content.shape for c in good if c is not None)


def _newest_sick(view: RunView, saves: list[Checkpoint]) -> tuple[Checkpoint, SickSave] | None:
    """The newest sick one of a series, newest first given, unless a healthy one is newer."""
    for checkpoint in saves:
        id = view.current_if_readable(checkpoint)
        verdict = view.history.verdict(id) if id is not None else None
        if verdict is None:
            continue
        found = sickness_in(verdict)
        try:
            logged = sick_since(view.run, checkpoint)
        except CouldNotTellError:
            logged = None
        if found is not None or logged is not None:
            since, why = logged or (None, "")
            sick = SickSave(
                path=checkpoint.path,
                series=checkpoint.series,
                step=checkpoint.step,
                reason=_words(found) if found is not None else why,
                since=since,
                stale=found is not None and found.check == "stale" and logged is None,
            )
            return checkpoint, sick
        if verdict.outcome is Outcome.GOOD:
            return None
    return None


def _words(finding: Finding) -> str:
    about = finding.tensor or finding.file
    return f"{about}: {finding.message}" if about else finding.message
