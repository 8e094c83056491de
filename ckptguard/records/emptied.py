"""Marks of checkpoints whose path was seen empty since a verdict. What appears there later is a new save, whatever its
times.

A mark names the verdict since which the path was seen empty, so a later verdict on files that came back outdates it.
"""

from __future__ import annotations

from ckptguard.decisions.known_good import CurrentVerdict
from ckptguard.records.run import Run, has_content, write_once
from ckptguard.records.who_and_when import utc_now
from ckptguard.values.record_formats import PLAIN

FOLDER = "emptied"


def emptied_key(current_verdict: CurrentVerdict) -> str:
    """The key of the mark of a generation with this verdict."""
    return f"{FOLDER}/{current_verdict.id.record_path}.{current_verdict.number:04d}.json"


def mark_emptied(run: Run, current_verdict: CurrentVerdict) -> None:
    """Record that the path of a generation is empty now. Raises StorageError."""
    write_once(run, emptied_key(current_verdict), {"format": PLAIN.writes, "since": utc_now()})


def was_emptied(run: Run, current_verdict: CurrentVerdict) -> bool:
    """True if its path was seen empty since its verdict. Raises StorageError."""
    return has_content(run, emptied_key(current_verdict))


def unmark_emptied(run: Run, current_verdict: CurrentVerdict) -> None:
    """Record that the same files are in place again. Raises StorageError."""
    run.records.remove(emptied_key(current_verdict))
