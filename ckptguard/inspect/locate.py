"""Locate: where the bytes of one generation are now: in place, in quarantine, or in its kept copy."""

from __future__ import annotations

from dataclasses import replace

from ckptguard.errors import NotFoundError, StorageError
from ckptguard.inspect.list_states import CheckpointState
from ckptguard.inspect.tensor_table import Source, find_source
from ckptguard.records.kept import read_kept
from ckptguard.records.quarantine import read_quarantined
from ckptguard.records.run import Run
from ckptguard.records.trash import trash_folder
from ckptguard.runs.history import load_history
from ckptguard.runs.listing import find_checkpoint
from ckptguard.values.ids import parse_id
from ckptguard.values.settings import Settings


def locate(run: Run, state: CheckpointState) -> Source | None:
    """Where a surveyed checkpoint can be read; None if it is gone."""
    key = parse_id(state.id) if state.id else None
    if state.in_place:
        checkpoint = find_checkpoint(run, state.path)
        if checkpoint is None:
            return None
        sealed = load_history(run).manifest(state.series, key) if key else None
        return Source(
            run.usable(state.path), run.storage, checkpoint, id=state.id, outcome=state.outcome, sealed=sealed
        )
    if key is None:
        return None
    mark, copy = read_quarantined(run, state.series, *key), read_kept(run, state.series, *key)
    places = []
    if mark is not None:
        places.append(mark.folder if mark.path == "." else f"{mark.folder}/{mark.path}")
    if state.kept and copy is not None:
        places.append(copy.checkpoint_key)
    if state.trashed:
        places.append(f"{trash_folder(state.series, *key)}/{state.path}")
    for place in places:
        try:
            found = find_source(run.usable_record(place), Settings())
        except (NotFoundError, StorageError):
            continue
        return replace(found, id=state.id, outcome=state.outcome)
    return None
