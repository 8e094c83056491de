"""Collect what killed processes left behind: temporaries of ours that nobody writes any more, and their pins."""

from __future__ import annotations

import contextlib

from ckptguard.errors import CouldNotTellError, ObjectMissingError
from ckptguard.records.pins import counts, list_pins, release_pin
from ckptguard.records.run import Run
from ckptguard.runs.run_view import RunView
from ckptguard.runs.stale_temporaries import was_left
from ckptguard.storage import Entry, Storage
from ckptguard.upkeep.leftover_saves import collect_saves
from ckptguard.values.ids import RECORDS_FOLDER, is_temporary


def collect_leftovers(view: RunView) -> list[str]:
    """Remove our own temporaries in the records (old ones) and of rollbacks in the run, pins that hold nothing any
    more, and what killed saves of our own layout left; returns their keys.

    The caller holds the run's lock, under which rollbacks stage their copies: what is left of one there is dead. A
    trainer's temporaries are its own business, whatever their age.
    """
    run = view.run
    try:
        inside = [e for e in run.records.list("", recursive=True) if e.name.startswith(".tmp-")]
    except ObjectMissingError:
        inside = []
    beside = [e for e in run.storage.list("") if e.kind == "folder" and e.name.startswith("tmp-rollback-")]
    removed = [f"{RECORDS_FOLDER}/{e.key}" for e in inside if _remove_if_left(run.records, e)]
    for entry in beside:
        if run.storage.root is not None:
            run.storage.remove(entry.key)
            removed.append(entry.key)
        elif _remove_if_left(run.storage, entry):
            removed.append(entry.key)
    return removed + _remove_pins(run) + collect_saves(run)


def _remove_pins(run: Run) -> list[str]:
    removed = []
    for pin in list_pins(run):
        if not counts(run, pin):
            with contextlib.suppress(CouldNotTellError):  # it does no harm
                release_pin(run, pin)
                removed.append(f"{RECORDS_FOLDER}/{pin.key}")
    return removed


def _remove_if_left(storage: Storage, entry: Entry) -> bool:
    if not is_temporary(entry.name) or not was_left(storage, entry):
        return False
    storage.remove(entry.key)
    return True
