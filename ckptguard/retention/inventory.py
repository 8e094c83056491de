"""Inventory: all that decides about what may be removed, read strictly: what cannot be read ends the whole look."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from ckptguard.decisions.retention import Present
from ckptguard.errors import RecordsError
from ckptguard.layouts import Checkpoint
from ckptguard.records.ledger import read_verdict
from ckptguard.records.trash import MARKED, Trashed, read_trash
from ckptguard.records.who_and_when import seconds_of
from ckptguard.runs.file_signatures import looks_unchanged
from ckptguard.runs.removal_holds import pins_of, references_to
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Outcome, Verdict


@dataclass(frozen=True)
class Look:
    """What is in place, as values to decide by, and the checkpoints by their paths."""

    present: list[Present]
    checkpoints: dict[str, Checkpoint]
    trash: list[Trashed]


@dataclass
class Remembered:
    """What earlier looks read of each checkpoint in place, by its path, and from which files and records.

    Records never change under their names, so an entry stands while files and names are the same. It only saves work.
    But they rot: what others may go because of is read again.
    """

    known: dict[str, tuple[object, Present]] = field(default_factory=dict)


def look(view: RunView, remembered: Remembered | None = None, *, keep_good: int = 0) -> Look:
    """Look at a run. What is in the trash is not in place, wherever its files lie. Only what is not `remembered` is
    read, and the newest `keep_good` good ones of each series.

    CouldNotTellError if any listing fails, or any record of what is in place cannot be read.
    """
    pins, references = pins_of(view.run), references_to(view)
    trash = read_trash(view.run)
    marked = {(mark.id, mark.path): mark.signature for mark in trash if mark.how == MARKED}
    before = remembered.known if remembered is not None else {}
    bases = {checkpoint.path: _basis(view, checkpoint) for checkpoint in view.checkpoints}
    stand = {path: before[path][1] for path, basis in bases.items() if path in before and before[path][0] == basis}
    for path in _newest_good(stand.values(), keep_good):
        del stand[path]
    known: dict[str, tuple[object, Present]] = {}
    present = []
    for checkpoint in view.checkpoints:
        one = stand.get(checkpoint.path) or _present(view, checkpoint)
        known[checkpoint.path] = bases[checkpoint.path], one
        signature = tuple((e.key, *e.signature) for e in checkpoint.entries)
        if marked.get((one.id, checkpoint.path)) == signature:
            continue
        holds = (*pins.get(one.id, ()), *references.get(checkpoint.path, ()))
        present.append(msgspec.structs.replace(one, holds=holds))
    if remembered is not None:
        remembered.known = known
    return Look(present=present, checkpoints={c.path: c for c in view.checkpoints}, trash=trash)


def strict_verdict(view: RunView, id: CheckpointId) -> Verdict | None:
    """The newest verdict on a generation, or None if there is none. RecordsError if it cannot be read: an older one
    may say something else."""
    standing = view.history.standings(id.series).get(id)
    if standing is None:
        return None
    verdict = read_verdict(view.run, standing)
    if verdict is None:
        raise RecordsError(
            f"the verdict {standing.number} on {id} of {id.series} cannot be read",
            hint="verify that checkpoint again: a newer verdict takes its place",
        )
    return verdict


def _newest_good(found: Iterable[Present], keep_good: int) -> list[str]:
    """The paths of the newest good ones of each series."""
    by_series: dict[str, list[Present]] = {}
    for one in found:
        if one.outcome is Outcome.GOOD:
            by_series.setdefault(one.id.series, []).append(one)
    ranked = (sorted(good, key=lambda one: one.id.order, reverse=True) for good in by_series.values())
    return [one.path for good in ranked for one in good[:keep_good]]


def _basis(view: RunView, checkpoint: Checkpoint) -> object:
    """All that `_present` depends on, without reading a record: the files, and the names of the records of its step."""
    history = view.history
    standings, sealed = history.standings(checkpoint.series), history.sealed(checkpoint.series)
    return (
        checkpoint.signature,
        [
            (id, id in sealed, history.is_quarantined(id), standings.get(id))
            for id in history.generations(checkpoint.series, checkpoint.step)
        ],
    )


def _present(view: RunView, checkpoint: Checkpoint) -> Present:
    """What is in place under a path, without what holds it."""
    id = view.current(checkpoint)
    manifest = view.history.manifest(id) if id is not None else None
    verdict = strict_verdict(view, id) if id is not None else None
    if id is None:
        id = view.history.next_id(checkpoint.series, checkpoint.step)
    return Present(
        path=checkpoint.path,
        id=id,
        outcome=_outcome(view, checkpoint, id, manifest, verdict),
        saved=seconds_of(manifest.sealed_at) if manifest is not None else None,
        metrics=manifest.metrics if manifest is not None else {},
        bytes=checkpoint.bytes,
    )


def _outcome(
    view: RunView, checkpoint: Checkpoint, id: CheckpointId, manifest: Manifest | None, verdict: Verdict | None
) -> Outcome:
    """What is known of the very files that are in place: a verdict on others that lay there before is none."""
    if verdict is None and manifest is None:
        unsealed = strict_verdict(view, id)  # INCOMPLETE so far
        return unsealed.outcome if unsealed is not None else Outcome.PENDING
    if verdict is None or manifest is None:
        return Outcome.PENDING
    if verdict.outcome is Outcome.GOOD and not looks_unchanged(checkpoint, manifest, verdict):
        return Outcome.PENDING
    return verdict.outcome
