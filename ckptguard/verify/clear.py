"""Clear: lift SUSPECT from a checkpoint, with a reason. Nothing else ever lifts it."""

from __future__ import annotations

from ckptguard.decisions.known_good import Standing
from ckptguard.errors import NotFoundError, RefusedError
from ckptguard.records.clock import utc_now
from ckptguard.records.ledger import append_verdict
from ckptguard.records.run import Run
from ckptguard.runs.history import History, Key, load_history
from ckptguard.values.ids import parse_id
from ckptguard.values.verdict import Facts, Outcome, Severity, Verdict, clearance
from ckptguard.version import __version__


def clear(run: Run, word: str, *, reason: str) -> Verdict:
    """Make the SUSPECT generation that `word` (path, id or step) names GOOD again; the new verdict keeps the reason.

    NotFoundError if no generation is meant, RefusedError if it is not SUSPECT: damage cannot be talked away.
    """
    history = load_history(run)
    series, standing = _chosen(run, history, word)
    if standing.outcome is not Outcome.SUSPECT:
        raise RefusedError(
            f"{standing.id} of {series} is {standing.outcome.value}, not suspect",
            outcome=standing.outcome.value,
            hint="only suspicion can be cleared",
        )
    key: Key = (standing.step, standing.generation)
    before = history.verdict(series, key)
    if history.manifest(series, key) is None:
        raise RefusedError(
            f"{standing.id} of {series} was never verified",
            outcome=standing.outcome.value,
            hint="move it back into the run and verify it",
        )
    kept = tuple(f for f in before.findings if f.severity is not Severity.SICKNESS) if before else ()
    verdict = Verdict(
        series=series,
        step=standing.step,
        generation=standing.generation,
        outcome=Outcome.GOOD,
        findings=(*kept, clearance(reason)),
        checked_at=utc_now(),
        version=__version__,
        facts=before.facts if before else Facts(),
    )
    append_verdict(run, verdict)
    return verdict


def _chosen(run: Run, history: History, word: str) -> tuple[str, Standing]:
    name = word.rstrip("/").removeprefix(run.url.rstrip("/") + "/")
    parsed = parse_id(word)
    step = int(word) if parsed is None and word.isascii() and word.isdigit() else None
    found = []
    for series in history.names:
        for key, standing in history.standings(series).items():
            manifest = history.manifest(series, key)
            if key == parsed or (step is not None and key[0] == step) or (manifest and manifest.path == name):
                found.append((series, standing))
    suspects = [f for f in found if f[1].outcome is Outcome.SUSPECT]
    chosen = suspects or found
    if not chosen:
        raise NotFoundError(f"the records of {run.url} know no checkpoint {word}")
    if len({series for series, _ in chosen}) > 1:
        names = ", ".join(sorted(series for series, _ in chosen))
        raise NotFoundError(f"{word} may mean a checkpoint of any of {names}", hint="name it by its path")
    return max(chosen, key=lambda f: f[1].generation)
