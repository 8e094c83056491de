"""Whether a temporary of ours was left by a process that is gone: nobody holds it, nobody has written it for long."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ckptguard.records.who_and_when import storage_time
from ckptguard.storage import Entry, Storage
from ckptguard.storage.local.writes import is_being_written

OLD = 3600.0  # seconds without a write; a copy of a large checkpoint touches its temporary all the time


def was_left(storage: Storage, entry: Entry) -> bool:
    """Whether a temporary file or folder is a leftover. In doubt it is none.

    Its writer holds it where the storage is a local disk, and is asked for first: a clock may jump. Beside that its age
    counts by our clock and by the storage's own, for either may be wrong.
    """
    # An object store tells no time of a folder, only of what lies in it.
    below = storage.list(entry.key, recursive=True) if entry.kind == "folder" else []
    if storage.root is not None or entry.kind != "folder":
        below = [entry, *below]
    if storage.root is not None and is_being_written(os.path.join(storage.root, *entry.key.split("/"))):
        return False
    return is_old(storage, below)


def is_old(storage: Storage, entries: Sequence[Entry]) -> bool:
    """Whether none of these was written for long, by both clocks."""
    times = [e.mtime_ns for e in entries if e.mtime_ns is not None]
    if not times or len(times) < len(entries):
        return False
    newest = max(times) / 1e9
    if time.time() - newest < OLD:
        return False
    now = storage_time(storage)
    return now is not None and now / 1e9 - newest >= OLD
