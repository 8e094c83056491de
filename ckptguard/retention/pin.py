"""Pin a checkpoint: it stays under any policy until it is unpinned or its time is over."""

from __future__ import annotations

import datetime

from ckptguard.errors import NotFoundError
from ckptguard.layouts import Checkpoint
from ckptguard.records.pins import PINNED, Pin, list_pins, pin_checkpoint, release_pin
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import CheckpointId


def pin(view: RunView, checkpoint: Checkpoint, *, note: str = "", lasts: datetime.timedelta | None = None) -> Pin:
    """Pin a checkpoint in place. Raises RecordsError if its generation is unknown."""
    return pin_checkpoint(view.run, _id(view, checkpoint), lasts=lasts, note=note)


def unpin(view: RunView, checkpoint: Checkpoint) -> list[Pin]:
    """Release every pin that a user set. Checkpoints in use stay in use. Raises NotFoundError if there is none."""
    id = _id(view, checkpoint)
    found = [p for p in list_pins(view.run) if (p.id, p.reason) == (id, PINNED)]
    if not found:
        raise NotFoundError(f"{checkpoint.path} is not pinned")
    for one in found:
        release_pin(view.run, one)
    return found


def _id(view: RunView, checkpoint: Checkpoint) -> CheckpointId:
    return view.current(checkpoint) or view.history.next_id(checkpoint.series, checkpoint.step)
