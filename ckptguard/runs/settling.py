"""Decide whether something is still being written.

A save is quiet if two samples `settle` seconds apart are equal, or if its files are older than that. A temporary
of ours is a leftover if no process holds it and it was not written for a long time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.who_and_when import storage_time
from ckptguard.storage import Entry, Storage
from ckptguard.storage.local.writes import is_being_written

if TYPE_CHECKING:
    from ckptguard.runs.run_view import RunView

OLD = 3600.0  # seconds without a write; copying a large checkpoint touches its temporary all the time


def youngest_age(checkpoint: Checkpoint) -> float | None:
    """Return the seconds since the newest file was written; None if no time is known or it is in the future."""
    newest = _newest((*checkpoint.entries, *checkpoint.irregular))
    age = -1.0 if newest is None else time.time() - newest
    return age if age >= 0 else None


def wait_until_quiet(
    checkpoint: Checkpoint, relist: Callable[[], Checkpoint | None], *, settle: float, limit: float
) -> Checkpoint | None:
    """Return the checkpoint once it is quiet; None if it changes or vanishes for `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        age = youngest_age(checkpoint)
        if age is not None and age >= settle:
            return checkpoint
        pause = settle if age is None else max(settle - age, 0.0)
        if time.monotonic() + pause > deadline:
            return None
        time.sleep(pause)
        again = relist()
        if again is None:
            return None
        if again.signature == checkpoint.signature:
            return again
        checkpoint = again


def quiet_in(view: RunView, checkpoint: Checkpoint, longest: float = math.inf) -> Checkpoint | None:
    """Return a checkpoint of a run once it is quiet; None if that takes twice `settle`, or `longest` seconds. What its
    writer seals is finished by the seal, and not by time."""
    if LAYOUTS[checkpoint.layout].sealed_by_writer:
        return checkpoint
    settle = view.settings.settle
    limit = min(2 * settle, longest)
    return wait_until_quiet(checkpoint, lambda: view.look_again(checkpoint.path), settle=settle, limit=limit)


def was_left(storage: Storage, entry: Entry) -> bool:
    """True if a temporary is certainly a leftover. On a local disk, first check that no writer holds it.

    Both our clock and the storage's clock must show that it is old, because either may be wrong.
    """
    # An object store reports no time for a folder, only for the objects in it.
    below = storage.list(entry.key, recursive=True) if entry.kind == "folder" else []
    if storage.root is not None or entry.kind != "folder":
        below = [entry, *below]
    if storage.root is not None and is_being_written(storage.path_of(entry.key)):
        return False
    return is_old(storage, below)


def is_old(storage: Storage, entries: Sequence[Entry]) -> bool:
    """True if all of these are old by both clocks."""
    newest = _newest(entries)
    if newest is None or time.time() - newest < OLD:
        return False
    now = storage_time(storage)
    return now is not None and now / 1e9 - newest >= OLD


def _newest(entries: Sequence[Entry]) -> float | None:
    """Return when the newest was written, in seconds since 1970; None if one time is unknown."""
    times = [e.mtime_ns for e in entries if e.mtime_ns is not None]
    return max(times) / 1e9 if times and len(times) == len(entries) else None
