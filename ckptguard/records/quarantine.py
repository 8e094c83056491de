"""Quarantine on storage: which generations were moved aside, and why."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from ckptguard.errors import RecordsError
from ckptguard.records.move_marks import Mark, read_mark
from ckptguard.records.run import Run, read_record, write_once
from ckptguard.values.ids import CheckpointId

FOLDER = "quarantine"


class Quarantined(Mark, frozen=True, kw_only=True):
    """One generation that was moved aside."""

    top: ClassVar[str] = FOLDER
    reason: str
    moved_at: str

    @property
    def written_at(self) -> float | None:
        """When its files were written, in seconds since 1970."""
        return max((time / 1e9 for _, _, time, *_ in self.signature if time is not None), default=None)


def mark_quarantined(run: Run, mark: Quarantined) -> bool:
    """Write the mark. False if this generation was already marked."""
    return write_once(run, mark.folder + ".json", mark)


def mark_moved(run: Run, mark: Quarantined) -> None:
    """Record that the move is done: later files at the path are new."""
    write_once(run, mark.folder + ".moved")


def was_moved(run: Run, mark: Quarantined) -> bool:
    """True if the move was finished."""
    return read_record(run, mark.folder + ".moved") is not None


def read_quarantined(run: Run, id: CheckpointId) -> Quarantined | None:
    """Return the mark of a generation, if it is readable, about that generation, and only has paths in the run."""
    with contextlib.suppress(RecordsError):
        return read_mark(run, Quarantined, id)
    return None
