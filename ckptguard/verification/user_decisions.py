"""User decisions about a checkpoint: clear a suspicion, accept other tensors, accept a re-save as new."""

from __future__ import annotations

import msgspec

from ckptguard.decisions.known_good import CurrentVerdict
from ckptguard.errors import BusyError, NotFoundError, RefusedError, SettingsError
from ckptguard.layouts import LAYOUTS
from ckptguard.records.run import Run
from ckptguard.records.run_settings import accept_reference
from ckptguard.records.who_and_when import utc_now
from ckptguard.runs.history import History
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView, select_checkpoint
from ckptguard.runs.work import PLAIN, Work
from ckptguard.values.ids import escape, parse_id, whole_number
from ckptguard.values.record_formats import VERDICT
from ckptguard.values.verdict import Facts, Outcome, Severity, Verdict, clearance
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from ckptguard.version import __version__


def accept(view: RunView, word: str, *, work: Work = PLAIN) -> Checked:
    """Accept the schema of a checkpoint (its path, id or step) from now on, and verify it again.

    Raises RefusedError if it could not even be sealed (INCOMPLETE).
    """
    checkpoint = select_checkpoint(view.run, view.checkpoints, word)
    first = verify_checkpoint(view, checkpoint, work=work)
    id = view.current(checkpoint)
    if id is None:
        raise RefusedError(f"{checkpoint.path} is {first.outcome.value}", outcome=first.outcome.value)
    accept_reference(view.run, id)
    return verify_checkpoint(view, checkpoint, work=work)


def reseal(view: RunView, word: str, *, work: Work = PLAIN) -> Checked:
    """Treat the files at a path, id or step as a new generation, and verify them as if seen for the first time.

    Use it if they were saved again, but ckptguard called them damaged in doubt, or if the records of a guard's save are
    lost. Their digests are accepted as they are; everything else is still checked. Raises SettingsError for a guard's
    save whose manifest can be read.
    """
    checkpoint = select_checkpoint(view.run, view.checkpoints, word)
    if LAYOUTS[checkpoint.layout].sealed_by_writer and view.current_if_readable(checkpoint) is not None:
        raise SettingsError(
            f"{escape(checkpoint.path)} can only be sealed by the training that writes it",
            hint="ckptguard verify says what is wrong; ckptguard repair restores damaged files",
        )
    return verify_checkpoint(view, checkpoint, Verification(resealed=True), work=work)


def clear(view: RunView, word: str, *, reason: str) -> Verdict:
    """Make the SUSPECT generation that `word` (path, id or step) names GOOD again. The new verdict keeps the reason.

    Nothing else lifts SUSPECT.

    Raises:
        NotFoundError: no generation has this name.
        RefusedError: it is not SUSPECT; damage cannot be cleared.
        BusyError: it got another verdict meanwhile.
    """
    return clear_current_verdict(view, suspect_named(view, word), word, reason=reason)


def suspect_named(view: RunView, word: str) -> CurrentVerdict:
    """Return the SUSPECT generation that `word` names. Raises as `clear`."""
    current_verdict = _chosen(view.run, view.history, word)
    if current_verdict.outcome is not Outcome.SUSPECT:
        raise RefusedError(
            f"{word} is {current_verdict.outcome.value}, not suspect",
            outcome=current_verdict.outcome.value,
            hint="only suspicion can be cleared",
        )
    if view.history.manifest(current_verdict.id) is None:
        raise RefusedError(
            f"{word} was never verified",
            outcome=current_verdict.outcome.value,
            hint="move it back into the run and verify it",
        )
    return current_verdict


def clear_current_verdict(view: RunView, current_verdict: CurrentVerdict, word: str, *, reason: str) -> Verdict:
    """Make the generation of this standing GOOD. Raises BusyError if it got another verdict meanwhile."""
    history, id = view.history, current_verdict.id
    before = history.verdict(id)
    kept = tuple(f for f in before.findings if f.severity is not Severity.SICKNESS) if before else ()
    verdict = Verdict(
        format=VERDICT.writes,
        **msgspec.structs.asdict(id),
        outcome=Outcome.GOOD,
        findings=(*kept, clearance(reason)),
        checked_at=utc_now(),
        version=__version__,
        facts=before.facts if before else Facts(),
        seen=before.seen if before else (),
    )
    history.add_verdict(verdict, after=current_verdict.number)
    history.refresh(id.series)
    if history.current_verdicts(id.series)[id].outcome is not Outcome.GOOD:
        raise BusyError(f"{word} got another verdict meanwhile: look at it again")
    return verdict


def _chosen(run: Run, history: History, word: str) -> CurrentVerdict:
    name = word.rstrip("/").removeprefix(run.url.rstrip("/") + "/")
    parsed = parse_id("", word)
    step = whole_number(word) if parsed is None else None
    found = []
    for series in history.names:
        for id, current_verdict in history.current_verdicts(series).items():
            manifest = history.manifest(id)
            meant = (parsed is not None and id.order == parsed.order) or id.record_path == word
            if meant or (step is not None and id.step == step) or (manifest and manifest.path == name):
                found.append(current_verdict)
    chosen = [s for s in found if s.outcome is Outcome.SUSPECT] or found
    if not chosen:
        raise NotFoundError(f"the records of {run.url} have no checkpoint {word}")
    if len({s.id.series for s in chosen}) > 1:
        names = ", ".join(sorted(s.id.series for s in chosen))
        raise NotFoundError(
            f"{word} may mean a checkpoint of any of {names}", hint="name the path of the one that you mean"
        )
    return max(chosen, key=lambda s: s.id.generation)
