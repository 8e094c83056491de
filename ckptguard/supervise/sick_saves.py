"""Which saves of a run are sick: training is at fault, not storage. From the records; reads no tensor bytes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ckptguard.errors import CouldNotTellError
from ckptguard.layouts import Checkpoint
from ckptguard.runs.find_known_good import Wanted, newest_candidate
from ckptguard.runs.run_view import RunView
from ckptguard.runs.trainer_log import sick_since
from ckptguard.values.ids import Step
from ckptguard.values.verdict import Outcome, Severity, Verdict

_DAMAGE = frozenset(("digests", "structure"))  # with these, a NaN may be what became of good bytes


class SickSave(msgspec.Struct, frozen=True, kw_only=True):
    """The newest saves of a series are sick; `path` is the newest of them. `since`: the step from which on the run's
    log says so, where it does (earlier checkpoints only are worth going back to)."""

    path: str
    series: str
    step: Step
    reason: str
    since: int | None = None


def sickness_in(verdict: Verdict) -> str | None:
    """Why training, and not storage, is at fault for a verdict; None if it is not, or if that cannot be known."""
    errors = [f for f in verdict.findings if f.severity is Severity.ERROR]
    if verdict.place_damaged or any(f.check in _DAMAGE for f in errors):
        return None
    # A model of zeros is an error of the same check, but without a count: storage makes such files too.
    numbers = [f for f in errors if f.check == "finite" and f.count]
    # Of check "incident" is what people or guards marked: they have acted on it already. "schema" is but a question.
    others = [f for f in verdict.findings if f.severity is Severity.SICKNESS and f.check not in ("incident", "schema")]
    for finding in (*numbers, *others):
        about = finding.tensor or finding.file
        return f"{about}: {finding.message}" if about else finding.message
    return None


def find_sick_saves(view: RunView, *, before: Iterable[object] = ()) -> list[SickSave]:
    """The series whose newest judged save in place is sick, and that there is reason to go back for: one with a
    known-good checkpoint; if the whole run has none, one that was saved since `before` (signatures).

    What has no step (``last.ckpt``, a dump of activations) is no reason by itself.
    """
    old = set(before)
    steps = sorted((c for c in view.checkpoints if c.step is not None), key=lambda c: c.step or 0, reverse=True)
    any_good = newest_candidate(view) is not None
    found = []
    for series in dict.fromkeys(c.series for c in view.checkpoints if c.step is not None):
        sick = _newest_sick(view, [c for c in steps if c.series == series])
        if sick is None:
            continue
        checkpoint, since, reason = sick
        series_good = any_good and newest_candidate(view, Wanted(series=series)) is not None
        if series_good or (not any_good and checkpoint.signature not in old):
            found.append(
                SickSave(path=checkpoint.path, series=series, step=checkpoint.step, reason=reason, since=since)
            )
    return found


def sick_without_step(view: RunView) -> list[str]:
    """Paths of sick checkpoints that have no step: they go when others do."""
    found = []
    for checkpoint in view.checkpoints:
        verdict = _verdict(view, checkpoint) if checkpoint.step is None else None
        if verdict is not None and sickness_in(verdict) is not None:
            found.append(checkpoint.path)
    return found


def _verdict(view: RunView, checkpoint: Checkpoint) -> Verdict | None:
    id = view.current_if_readable(checkpoint)
    return view.history.verdict(id) if id is not None else None


def _newest_sick(view: RunView, saves: list[Checkpoint]) -> tuple[Checkpoint, int | None, str] | None:
    """The newest sick one of a series, newest first given, unless a healthy one is newer."""
    for checkpoint in saves:
        verdict = _verdict(view, checkpoint)
        if verdict is None:
            continue
        reason = sickness_in(verdict)
        try:
            logged = sick_since(view.run, checkpoint)
        except CouldNotTellError:
            logged = None
        if reason is not None or logged is not None:
            return checkpoint, logged[0] if logged else None, reason or (logged[1] if logged else "")
        if verdict.outcome is Outcome.GOOD:
            return None
    return None
