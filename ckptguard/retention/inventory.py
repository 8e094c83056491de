"""Present: all that decides about what may be removed, read strictly: what cannot be read ends the whole look."""

from __future__ import annotations

from dataclasses import dataclass

from ckptguard.decisions.retention import Present
from ckptguard.errors import RecordsError
from ckptguard.layouts import Checkpoint
from ckptguard.records.elapsed import seconds_of
from ckptguard.records.ledger import read_verdict
from ckptguard.records.run import Run
from ckptguard.records.trash import MARKED, Trashed, read_trash
from ckptguard.runs.file_signatures import looks_unchanged
from ckptguard.runs.history import History, Key, load_history
from ckptguard.runs.listing import list_checkpoints
from ckptguard.runs.removal_holds import pins_of, references_to
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Outcome, Verdict


@dataclass(frozen=True)
class Look:
    """What is in place, as values to decide by, and the checkpoints by their paths."""

    present: list[Present]
    checkpoints: dict[str, Checkpoint]
    trash: list[Trashed]


def look(run: Run) -> Look:
    """Look at a run. What is in the trash is not in place, wherever its files lie.

    CouldNotTellError if any listing fails, or any record of what is in place cannot be read.
    """
    history = load_history(run)
    checkpoints = list_checkpoints(run)
    pins, references = pins_of(run), references_to(run, checkpoints)
    trash = read_trash(run)
    marked = {(m.series, m.step, m.generation, m.path): m.signature for m in trash if m.how == MARKED}
    present = []
    for checkpoint in checkpoints:
        key = history.current(checkpoint.series, checkpoint.step, checkpoint.path)
        manifest = history.manifest(checkpoint.series, key) if key is not None else None
        verdict = strict_verdict(run, history, checkpoint.series, key) if key is not None else None
        if key is None:
            key = (checkpoint.step, history.next_generation(checkpoint.series, checkpoint.step))
        signature = tuple((e.key, *e.signature) for e in checkpoint.entries)
        if marked.get((checkpoint.series, *key, checkpoint.path)) == signature:
            continue
        present.append(
            Present(
                path=checkpoint.path,
                series=checkpoint.series,
                step=checkpoint.step,
                generation=key[1],
                outcome=_outcome(run, history, checkpoint, key, manifest, verdict),
                saved=seconds_of(manifest.sealed_at) if manifest is not None else None,
                metrics=manifest.metrics if manifest is not None else {},
                bytes=checkpoint.bytes,
                holds=(*pins.get((checkpoint.series, key), ()), *references.get(checkpoint.path, ())),
            )
        )
    return Look(present=present, checkpoints={c.path: c for c in checkpoints}, trash=trash)


def strict_verdict(run: Run, history: History, series: str, key: Key) -> Verdict | None:
    """The newest verdict on a generation, or None if there is none. RecordsError if it cannot be read: an older one
    may say something else."""
    standing = history.standings(series).get(key)
    if standing is None:
        return None
    verdict = read_verdict(run, series, standing)
    if verdict is None:
        raise RecordsError(
            f"the verdict {standing.number} on {standing.id} of {series} cannot be read",
            hint="verify that checkpoint again: a newer verdict takes its place",
        )
    return verdict


def _outcome(
    run: Run, history: History, checkpoint: Checkpoint, key: Key, manifest: Manifest | None, verdict: Verdict | None
) -> Outcome:
    """What is known of the very files that are in place: a verdict on others that lay there before is none."""
    if verdict is None and manifest is None:
        unsealed = strict_verdict(run, history, checkpoint.series, key)  # INCOMPLETE so far
        return unsealed.outcome if unsealed is not None else Outcome.PENDING
    if verdict is None or manifest is None:
        return Outcome.PENDING
    if verdict.outcome is Outcome.GOOD and not looks_unchanged(checkpoint, manifest, verdict):
        return Outcome.PENDING
    return verdict.outcome
