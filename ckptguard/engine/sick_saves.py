"""Find the saves of a run that are sick: training is at fault, not storage. Reads records, no tensor bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from ckptguard.checks.schema import QUESTIONS
from ckptguard.decisions.restarts import is_far_before
from ckptguard.decisions.rollback_plan import Content
from ckptguard.errors import CouldNotTellError
from ckptguard.layouts import Checkpoint
from ckptguard.recover.rollback_scope import content_lying, content_of, training_in
from ckptguard.runs.file_signatures import looks_as_read
from ckptguard.runs.find_known_good import Wanted, newest_candidate
from ckptguard.runs.run_view import RunView
from ckptguard.runs.trainer_log import sick_since
from ckptguard.values.ids import Step, folder_of, numbers_of
from ckptguard.values.verdict import Finding, Outcome, Severity, Verdict

_DAMAGE = frozenset(("digests", "structure"))  # with these, a NaN may come from damage to good bytes


class SickSave(msgspec.Struct, frozen=True, kw_only=True):
    """The newest saves of a series are sick; `path` is the newest of them.

    - `since`: the step from which the run's log shows it. Only earlier checkpoints are worth going back to.
    - `stale`: the only problem is that nothing changed.
    - `anew`: it is healthy, but training began from scratch instead of continuing.
    """

    path: str
    series: str
    step: Step
    reason: str
    since: int | None = None
    stale: bool = False
    anew: bool = False

    @property
    def folder(self) -> str:
        """The folder of the save."""
        return folder_of(self.path)


def sickness_in(verdict: Verdict) -> Finding | None:
    """Return the finding by which training is at fault for a verdict, or None if storage is or may be."""
    errors = [f for f in verdict.findings if f.severity is Severity.ERROR]
    if verdict.place_damaged or any(f.check in _DAMAGE for f in errors):
        return None
    # A model of zeros is an error of the same check without a count: storage makes such files, too.
    numbers = [f for f in errors if f.check == "finite" and f.count]
    # Check "incident" is a mark of people or guards, who have already acted on it. Questions are no reason, and
    # "structure" is a doubt about how the file was written.
    suspicions = [f for f in verdict.findings if f.severity is Severity.SICKNESS]
    others = [f for f in suspicions if f.check not in ("incident", "structure", *QUESTIONS)]
    return next(iter((*numbers, *others)), None)


def find_sick_saves(view: RunView, *, before: Iterable[object] = ()) -> list[SickSave]:
    """Return the series whose newest judged save in place is sick, if that is a reason to go back.

    The save times decide which is newest. Files that existed `before` are ordered by number, because copying a run
    changes their times. It is a reason if the series has a known-good checkpoint. In a run without any, so is a new
    save that training may resume from, or any new save. A dump of activations is no reason.
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


def find_fresh_start(view: RunView, went_back_to: Content, lying: Collection[object]) -> tuple[bool, SickSave | None]:
    """Find the first save after a restart, when other files were `lying` there. The flag says whether it can be judged.

    The save is returned if training began from scratch instead of continuing from what it went back to.
    """
    folder = folder_of(went_back_to.path)
    new = [c for c in view.checkpoints if folder_of(c.path) == folder and c.signature not in lying]
    for checkpoint in sorted(new, key=lambda c: (c.written_at, c.path)):
        if _is_recorded_of_before(view, checkpoint):
            return False, None
        content = content_lying(view, checkpoint)
        kind = is_far_before(content.counters, went_back_to.counters)
        if kind is not None:
            here, there = content.counters[kind], went_back_to.counters[kind]
            reason = f"training began from scratch: {kind} is {here}, but it should continue from {there}"
            path, series, step = checkpoint.path, checkpoint.series, checkpoint.step
            return True, SickSave(path=path, series=series, step=step, reason=reason, anew=True)
        return bool(content.counters), None  # without any, nothing is known about it yet
    return False, None


def _is_recorded_of_before(view: RunView, checkpoint: Checkpoint) -> bool:
    """True if what is on record of a path is of another file that lay there: the new one is not judged yet."""
    id = view.current_if_readable(checkpoint)
    manifest = view.history.manifest(id) if id is not None else None
    if id is None or manifest is None:
        return False
    return not looks_as_read(checkpoint.entries, manifest, view.history.verdict(id))


def _written(checkpoint: Checkpoint, old: Collection[object]) -> int:
    """Return when something new was written, by the storage's clock."""
    return checkpoint.written_at if checkpoint.signature not in old else 0


def _is_reason(view: RunView, checkpoint: Checkpoint, sick: SickSave, *, is_new: bool, any_good: bool) -> bool:
    if any_good and newest_candidate(view, Wanted(series=sick.series)) is not None:
        return True
    if not any_good or not is_new:
        return is_new and not any_good
    content, history = content_lying(view, checkpoint), view.history
    if content.has_optimizer or any(history.was_good(id) for id in history.current_verdicts(sick.series)):
        return True
    training = training_in(view, sick.folder)
    beside = {c.series for c in view.checkpoints if folder_of(c.path) in training}
    good = (newest_candidate(view, Wanted(series=series)) for series in beside)
    return content.shape is not None and any(content_of(c).shape == content.shape for c in good if c is not None)


def _newest_sick(view: RunView, saves: list[Checkpoint]) -> tuple[Checkpoint, SickSave] | None:
    """Return the newest sick save of a series, given newest first, unless a healthy one is newer."""
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
                reason=found.sentence if found is not None else why,
                since=since,
                stale=found is not None and found.check == "stale" and logged is None,
            )
            return checkpoint, sick
        if verdict.outcome is Outcome.GOOD:
            return None
    return None
