"""Is something still being written? A save is quiet by two equal samples `settle` seconds apart, or older files.

A temporary of ours was left by a process that is gone if nobody holds it, and nobody has written it for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ckptguard.layouts import Checkpoint
from ckptguard.records.who_and_when import storage_time
from ckptguard.storage import Entry, Storage
from ckptguard.storage.local.writes import is_being_written

OLD = 3600.0  # seconds without a write; a copy of a large checkpoint touches its temporary all the time


def youngest_age(checkpoint: Checkpoint) -> float | None:
    """Seconds since the newest file was written, by its mtime; None where no mtime is known or one lies ahead."""
    newest = _newest((*checkpoint.entries, *checkpoint.irregular))
    age = -1.0 if newest is None else time.time() - newest
    return age if age >= 0 else None


def wait_until_quiet(
    checkpoint: Checkpoint, relist: Callable[[], Checkpoint | None], *, settle: float, limit: float
) -> Checkpoint | None:
    """The checkpoint once it is quiet; None if it goes on changing (or vanishes) for `limit` seconds."""
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


def was_left(storage: Storage, entry: Entry) -> bool:
    """True if a temporary is a leftover; in doubt it is none. On a local disk its writer holds it, and is asked for
    first. Its age counts by our clock and by the storage's own, for either may be wrong."""
    # An object store tells no time of a folder, only of what lies in it.
    below = storage.list(entry.key, recursive=True) if entry.kind == "folder" else []
    if storage.root is not None or entry.kind != "folder":
        below = [entry, *below]
    if storage.root is not None and is_being_written(storage.path_of(entry.key)):
        return False
    return is_old(storage, below)


def is_old(storage: Storage, entries: Sequence[Entry]) -> bool:
    """True if none of these was written for long, by both clocks."""
    newest = _newest(entries)
    if newest is None or time.time() - newest < OLD:
        return False
    now = storage_time(storage)
    return now is not None and now / 1e9 - newest >= OLD


def _newest(entries: Sequence[Entry]) -> float | None:
    """When the newest was written, in seconds since 1970; None unless that of each is known."""
    times = [e.mtime_ns for e in entries if e.mtime_ns is not None]
    return max(times) / 1e9 if times and len(times) == len(entries) else None
