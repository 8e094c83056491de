"""Collect what killed processes left behind: temporaries of ours that nobody writes any more, and their pins."""

from __future__ import annotations

import contextlib
import os
import secrets
import time

from ckptguard.errors import CouldNotTellError, ObjectMissingError
from ckptguard.names import RECORDS_FOLDER, is_temporary
from ckptguard.operations.collect_saves import collect_saves
from ckptguard.records.pins import counts, list_pins, release_pin
from ckptguard.records.run import Run
from ckptguard.storage import Entry, Storage
from ckptguard.storage.local_writes import is_being_written

OLD = 3600.0  # seconds without a write; a copy of a large checkpoint touches its temporary all the time


def collect_leftovers(run: Run) -> list[str]:
    """Remove our own temporaries in the records (old ones) and of rollbacks in the run, pins that hold nothing any
    more, and what killed saves left on a storage elsewhere; returns their keys.

    The caller holds the run's lock, under which rollbacks stage their copies: what is left of one there is dead. A
    trainer's temporaries are its own business, whatever their age.
    """
    try:
        inside = [e for e in run.records.list("", recursive=True) if e.name.startswith(".tmp-")]
    except ObjectMissingError:
        inside = []
    beside = [e for e in run.storage.list("") if e.kind == "folder" and e.name.startswith("tmp-rollback-")]
    removed = [f"{RECORDS_FOLDER}/{e.key}" for e in inside if _remove_if_old(run.records, e)]
    for entry in beside:
        if run.storage.root is not None:
            run.storage.remove(entry.key)
            removed.append(entry.key)
        elif _remove_if_old(run.storage, entry):
            removed.append(entry.key)
    return removed + _remove_pins(run) + collect_saves(run)


def _remove_pins(run: Run) -> list[str]:
    removed = []
    for pin in list_pins(run):
        if not counts(pin):
            with contextlib.suppress(CouldNotTellError):  # it does no harm
                release_pin(run, pin)
                removed.append(f"{RECORDS_FOLDER}/{pin.key}")
    return removed


def _remove_if_old(storage: Storage, entry: Entry) -> bool:
    # An object store tells no time of a folder, only of what lies in it.
    below = storage.list(entry.key, recursive=True) if entry.kind == "folder" else [entry]
    times = [e.mtime_ns for e in below if e.mtime_ns is not None]
    if not times or len(times) < len(below) or not is_temporary(entry.name):
        return False
    # By the storage's own clock too: ours may be wrong, and to remove what is being written would break a write.
    if time.time() - max(times) / 1e9 < OLD or _clock_of(storage) - max(times) / 1e9 < OLD:
        return False
    if storage.root is not None and is_being_written(os.path.join(storage.root, *entry.key.split("/"))):
        return False
    storage.remove(entry.key)
    return True


def _clock_of(storage: Storage) -> float:
    """What time it is on the storage: that of a file which is written now."""
    key = f".tmp-{secrets.token_hex(8)}"
    storage.create(key, b"")
    try:
        return (storage.stat(key).mtime_ns or 0) / 1e9
    finally:
        storage.remove(key)
