"""Bisect: compare the last good checkpoint of a series with the first bad one, and list what is wrong in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from ckptguard.errors import CkptguardError, CouldNotTellError, NotFoundError, SettingsError
from ckptguard.inspect.bad_tensors import Culprit, find_culprits
from ckptguard.inspect.diff import Diff, diff_sources
from ckptguard.inspect.list_states import CheckpointState, survey
from ckptguard.inspect.tensor_table import locate
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import quiet_in
from ckptguard.runs.work import PLAIN, Work
from ckptguard.values.verdict import Finding, Outcome
from ckptguard.verification.checkpoint import Verification, judge_in_run

_LONGEST_WAIT = 60.0  # seconds for files that are still being written; the newest save rarely turned bad


class Bisection(msgspec.Struct, frozen=True, kw_only=True):
    """Where a series turned bad: `last_good`, and the next bad one after it, `first_bad`.

    It is the newest such turn. Nothing is known about those in between. Without a good one, `first_bad` is the first
    bad one of all. `culprits`: what is wrong in it. `diff`: its comparison with the newest good one that still exists.
    None if they cannot be compared; `notes` say why. `stages` are what a survey says of the series, ordered by step and
    generation, with the verdicts that were given now.
    """

    target: str
    series: str | None
    stages: tuple[CheckpointState, ...]
    last_good: CheckpointState | None = None
    first_bad: CheckpointState | None = None
    findings: tuple[Finding, ...] = ()
    culprits: tuple[Culprit, ...] = ()
    diff: Diff | None = None
    notes: tuple[str, ...] = ()
    could_not_tell: bool = False


def bisect_run(view: RunView, *, series: str | None = None, record: bool = True, work: Work = PLAIN) -> Bisection:
    """Find where a run turned bad, from its recorded verdicts. Checkpoints without one are verified first.

    Those verdicts are recorded, unless `record` is false.

    Raises:
        NotFoundError: there are no checkpoints.
        SettingsError: several series turned bad, and none is named.
    """
    notes: list[str] = []
    judged, unsure = _verify_pending(view, series, notes, record=record, work=work)
    by_series: dict[str, list[CheckpointState]] = {}
    for state in survey(view):
        if series in (None, state.series):
            outcome = Outcome.PENDING if state.changed else state.outcome
            fresh = judged.get(state.path) if outcome is Outcome.PENDING else None
            stage = msgspec.structs.replace(state, outcome=fresh.outcome if fresh is not None else outcome)
            by_series.setdefault(state.series, []).append(stage)
    if not by_series:
        what = f" of series {series}" if series is not None else ""
        raise NotFoundError(f"{view.run.url} has no checkpoints{what} whose step is known")
    for stages in by_series.values():
        stages.sort(key=lambda s: (s.step, s.id.generation if s.id is not None else 0, s.path))
    chosen = _choose(by_series)
    only = next(iter(by_series)) if len(by_series) == 1 else None
    stages = by_series[chosen] if chosen is not None else list(itertools.chain.from_iterable(by_series.values()))
    whole = Bisection(target=view.run.url, series=chosen or only, stages=tuple(stages), could_not_tell=unsure)
    if chosen is None:
        return msgspec.structs.replace(whole, notes=tuple(notes))
    good, at = _turn(stages)
    bad = stages[at]
    verdict, fresh = view.history.verdict(bad.id) if bad.id is not None else None, judged.get(bad.path)
    findings = (verdict.findings if verdict is not None else ()) or (fresh.findings if fresh is not None else ())
    source = locate(view, bad)
    culprits: tuple[Culprit, ...] = ()
    found: Diff | None = None
    try:
        culprits = find_culprits(source, bad.path, findings, work=work)
        earlier = [s for s in stages[:at] if s.outcome is Outcome.GOOD]
        sources = (locate(view, stage) for stage in reversed(earlier))
        before = next((s for s in sources if s is not None), None)
        if source is None:
            notes.append(f"{bad.path} is gone: only its verdict is left")
        elif before is None:
            notes.append("there is no good checkpoint before it to compare it with")
        else:
            found = diff_sources(before, source, work=work)
    except CkptguardError as error:
        notes.append(f"the two cannot be compared: {error.message}")
    return msgspec.structs.replace(
        whole,
        last_good=stages[good] if good is not None else None,
        first_bad=bad,
        findings=findings,
        culprits=culprits,
        diff=found,
        notes=tuple(notes),
    )


def _verify_pending(
    view: RunView, series: str | None, notes: list[str], *, record: bool, work: Work
) -> tuple[dict[str, Checked], bool]:
    """Verify what has no verdict, or changed since. Returns the results by path, and whether something was
    unreadable."""
    pending = {s.path for s in survey(view) if s.in_place and (s.outcome is Outcome.PENDING or s.changed)}
    judge = judge_in_run(view, Verification(record=record), notes, work)
    answers: dict[str, Checked] = {}
    unsure = False
    for checkpoint in view.checkpoints:
        if checkpoint.path not in pending or series not in (None, checkpoint.series):
            continue
        quiet = quiet_in(view, checkpoint, _LONGEST_WAIT)
        if quiet is None:
            notes.append(f"{checkpoint.path} is still being written")
            continue
        try:
            answers[checkpoint.path] = judge(quiet)
        except CouldNotTellError as error:
            unsure = True
            notes.append(f"{checkpoint.path} could not be verified: {error.message}")
    return answers, unsure


def _choose(by_series: dict[str, list[CheckpointState]]) -> str | None:
    """Return the one series that turned bad, else the only one with bad checkpoints."""
    bad = [name for name, stages in by_series.items() if any(s.outcome is Outcome.BAD for s in stages)]
    turned = [name for name in bad if _turn(by_series[name])[0] is not None] or bad
    if len(turned) > 1:
        raise SettingsError(f"several series turned bad: {', '.join(sorted(turned))}", hint="choose one with --series")
    return turned[0] if turned else None


def _turn(stages: Sequence[CheckpointState]) -> tuple[int | None, int]:
    """Return (last good, first bad): the newest good one with a bad one after it, and the next bad one."""
    bad = [i for i, stage in enumerate(stages) if stage.outcome is Outcome.BAD]
    good = max((i for i, s in enumerate(stages[: bad[-1]]) if s.outcome is Outcome.GOOD), default=None)
    return good, next(i for i in bad if good is None or i > good)
