"""Locate: where the bytes of one generation are now: in place, in quarantine, or in its kept copy."""

from __future__ import annotations

from dataclasses import replace

from ckptguard.errors import NotFoundError, StorageError
from ckptguard.inspect.list_states import CheckpointState
from ckptguard.inspect.tensor_table import TensorSource, find_source
from ckptguard.records.kept import read_kept
from ckptguard.records.quarantine import read_quarantined
from ckptguard.records.trash import trash_folder
from ckptguard.runs.run_view import RunView
from ckptguard.values.settings import Settings


def locate(view: RunView, state: CheckpointState) -> TensorSource | None:
    """Where a surveyed checkpoint can be read; None if it is gone."""
    run, id = view.run, state.id
    if state.in_place:
        checkpoint = view.look_again(state.path)
        if checkpoint is None:
            return None
        sealed = view.history.manifest(id) if id is not None else None
        return TensorSource(
            run.usable(state.path), run.storage, checkpoint, id=id, outcome=state.outcome, sealed=sealed
        )
    if id is None:
        return None
    mark, copy = read_quarantined(run, id), read_kept(run, id)
    places = []
    if mark is not None:
        places.append(mark.folder if mark.path == "." else f"{mark.folder}/{mark.path}")
    if state.kept and copy is not None:
        places.append(copy.checkpoint_key)
    if state.trashed:
        places.append(f"{trash_folder(id)}/{state.path}")
    for place in places:
        try:
            found = find_source(run.usable_record(place), Settings())
        except (NotFoundError, StorageError):
            continue
        return replace(found, id=id, outcome=state.outcome)
    return None
