"""The trash on storage: what retention removed, until its grace period is over."""

from __future__ import annotations

from typing import ClassVar

from ckptguard.records.move_marks import Mark, list_marks, mark_folder, read_mark
from ckptguard.records.run import Run, list_records, write_once
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import CheckpointId, id_from_record

FOLDER = "trash"
MOVED, MARKED = "moved", "marked"


class Trashed(Mark, frozen=True, kw_only=True):
    """One generation that was removed. "moved": its files are at ``<folder>/<path>``. "marked": they stay in place
    until the grace period is over. `host`, `boot_id` and `uptime` give the time beside the clock.

    `becomes`: it was only thinned, to this generation of its step. Its files in `stays` are in place, too, and linked
    here. `bytes` are those of the others."""

    top: ClassVar[str] = FOLDER
    how: str
    bytes: int
    removed_at: str
    host: str
    boot_id: str
    uptime: float
    becomes: int = 0
    stays: tuple[str, ...] = ()

    def is_about(self, id: CheckpointId) -> bool:
        """True if it is also a mark as we write it: the root of a run is never removed."""
        return self.how in (MOVED, MARKED) and self.path != "." and super().is_about(id)


def trash_folder(id: CheckpointId) -> str:
    """Return the folder of a generation's files in the trash."""
    return mark_folder(FOLDER, id)


def mark_trashed(run: Run, mark: Trashed) -> bool:
    """Write the mark. False if this generation has one: another process is removing it."""
    return write_once(run, mark.folder + ".json", mark)


def mark_taken(run: Run, mark: Trashed) -> None:
    """Record that its place no longer counts: all files are in the trash, or those in place are being removed."""
    write_once(run, mark.folder + ".taken")


def is_taken(run: Run, mark: Trashed) -> bool:
    """True if its place no longer counts."""
    found = find_entry(run.records, mark.folder + ".taken")
    return found is not None and found.kind == "file"


def unmark_taken(run: Run, mark: Trashed) -> None:
    """Record that its place counts again."""
    run.records.remove(mark.folder + ".taken")


def forget_trashed(run: Run, mark: Trashed) -> None:
    """Remove a generation from the trash, its mark first. After a kill `remove_unmarked` finishes it."""
    run.records.remove(mark.folder + ".json")
    unmark_taken(run, mark)
    run.records.remove(mark.folder)


def remove_unmarked(run: Run) -> None:
    """Remove everything in the trash without a mark, which is written before its files. The caller holds the lock."""
    for folder in list_records(run, FOLDER):
        names = set(list_records(run, f"{FOLDER}/{folder}"))
        for name in names:
            own = name.removesuffix(".taken")
            id = id_from_record(folder, own)
            # Beside records elsewhere a user may have a folder such as trash/old/2026.1.
            if id is not None and id.record_name == own and f"{own}.json" not in names:
                run.records.remove(f"{FOLDER}/{folder}/{name}")


def list_trashed(run: Run) -> list[CheckpointId]:
    """Return every generation in the trash, sorted by name."""
    return list_marks(run, FOLDER)


def read_trash(run: Run) -> list[Trashed]:
    """Return all marks. Raises RecordsError if one cannot be read."""
    found = (read_trashed(run, id) for id in list_trashed(run))
    return [mark for mark in found if mark is not None]


def read_trashed(run: Run, id: CheckpointId) -> Trashed | None:
    """Return the mark of a generation, or None. Raises RecordsError if it is unreadable, or has paths elsewhere."""
    return read_mark(run, Trashed, id)
