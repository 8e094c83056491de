"""Pin: have a checkpoint stay, whatever a policy says, until it is unpinned or a time has come."""

from __future__ import annotations

import datetime

from ckptguard.errors import NotFoundError
from ckptguard.layouts import Checkpoint
from ckptguard.records.pins import PINNED, Pin, list_pins, pin_checkpoint, release_pin
from ckptguard.records.run import Run
from ckptguard.runs.history import Key, load_history


def pin(run: Run, checkpoint: Checkpoint, *, note: str = "", lasts: datetime.timedelta | None = None) -> Pin:
    """Pin what lies in place. RecordsError if it cannot be told which generation that is."""
    return pin_checkpoint(run, checkpoint.series, _key(run, checkpoint), lasts=lasts, note=note)


def unpin(run: Run, checkpoint: Checkpoint) -> list[Pin]:
    """Release every pin that somebody asked for; what is in use stays so. NotFoundError if there is none."""
    key = _key(run, checkpoint)
    found = [
        p for p in list_pins(run) if (p.series, (p.step, p.generation), p.reason) == (checkpoint.series, key, PINNED)
    ]
    if not found:
        raise NotFoundError(f"{checkpoint.path} is not pinned")
    for one in found:
        release_pin(run, one)
    return found


def _key(run: Run, checkpoint: Checkpoint) -> Key:
    history = load_history(run)
    current = history.current(checkpoint.series, checkpoint.step, checkpoint.path)
    return current or (checkpoint.step, history.next_generation(checkpoint.series, checkpoint.step))
