"""Pin a checkpoint: it stays under any policy until it is unpinned or its time is over."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterable

from ckptguard.errors import CkptguardError, NotFoundError
from ckptguard.layouts import Checkpoint
from ckptguard.records.pins import PINNED, Pin, list_pins, pin_checkpoint, release_pin
from ckptguard.runs.find_known_good import ANY
from ckptguard.runs.run_view import RunView
from ckptguard.runs.saved_together import RecordedSaves, save_of
from ckptguard.values.ids import CheckpointId


def pin(view: RunView, checkpoint: Checkpoint, *, note: str = "", lasts: datetime.timedelta | None = None) -> list[Pin]:
    """Pin a checkpoint in place, and all that is saved with it. Returns its own pin first.

    Raises:
        RecordsError: its generation is unknown.
        StorageError: not all could be pinned. Then none is.
    """
    id = pinned_id(view, checkpoint)
    ids = [id, *(part.id for part in save_of(RecordedSaves(view.history, ANY, every_copy=True), id) or ())]
    save = uuid.uuid4().hex if len(ids) > 1 else ""
    pins: list[Pin] = []
    try:
        for one in dict.fromkeys(ids):
            pins.append(pin_checkpoint(view.run, one, lasts=lasts, note=note, save=save))
    except CkptguardError:
        release(view, pins)
        raise
    return pins


def unpin(view: RunView, checkpoint: Checkpoint) -> list[Pin]:
    """Release every pin that a user set, and those set with it on what is saved together. Checkpoints in use stay in
    use. Raises NotFoundError if there is none."""
    found = pins_on(view, checkpoint)
    release(view, found)
    return found


def release(view: RunView, pins: Iterable[Pin]) -> None:
    """Release these pins."""
    for one in pins:
        release_pin(view.run, one)


def pins_on(view: RunView, checkpoint: Checkpoint) -> list[Pin]:
    """Return every pin that a user set on a checkpoint, and those set with it. Raises NotFoundError if there is
    none."""
    id, pins = pinned_id(view, checkpoint), [p for p in list_pins(view.run) if p.reason == PINNED]
    own = [p for p in pins if p.id == id]
    if not own:
        raise NotFoundError(f"{checkpoint.path} is not pinned")
    saves = {p.save for p in own if p.save}
    return own + [p for p in pins if p.save in saves and p.id != id]


def pinned_id(view: RunView, checkpoint: Checkpoint) -> CheckpointId:
    """Return the id that a pin on a checkpoint in place names."""
    return view.current(checkpoint) or view.history.next_id(checkpoint.series, checkpoint.step)
