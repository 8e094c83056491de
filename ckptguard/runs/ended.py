"""Runs of which only records are left: their training has ended, and somebody removed what it saved."""

from __future__ import annotations

import time

from ckptguard.errors import ObjectMissingError
from ckptguard.records.daemon_record import KEY as DAEMON
from ckptguard.records.leases import list_trainings, surely_gone
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import escape

SHOWN = 86400.0  # seconds for which a run that has ended is shown
REMOVED = "ended: it was removed"


def ended_words(url: str) -> str:
    """Return what to say of a run of which only records are left."""
    return f"ended: only its records are left (ckptguard forget {escape(url)})"


def ended_at(view: RunView) -> float | None:
    """Return when the records of a run last changed, in seconds since 1970, if they are all that is left of it.

    None if there are other files, if no checkpoint is on record, or if its training goes on for certain, and will save
    again. Nothing is written.
    """
    run = view.run
    if view.entries or not view.history.series:
        return None
    try:
        entries = run.records.list("", recursive=True)
    except ObjectMissingError:
        entries = []
    newest = max((e.mtime_ns for e in entries if e.mtime_ns is not None and e.key != DAEMON), default=None)
    at = time.time() if newest is None else newest / 1e9
    if time.time() - at < SHOWN and any(not surely_gone(run, one) for one in list_trainings(run)):
        return None
    return at
