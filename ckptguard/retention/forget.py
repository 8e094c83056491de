"""Forget a run: remove the records of one whose checkpoints are gone."""

from __future__ import annotations

import msgspec

from ckptguard.errors import FORCE, BusyError, NotFoundError, ObjectMissingError
from ckptguard.records.kept import FOLDER as KEPT
from ckptguard.records.keys import records_in
from ckptguard.records.leases import list_trainings, surely_gone
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run, says_whose
from ckptguard.records.trash import FOLDER as TRASH
from ckptguard.runs.removal import remove_records
from ckptguard.runs.run_view import RunView
from ckptguard.storage import Entry

_COPIES = (KEPT, QUARANTINE, TRASH)


class Forgotten(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed, or would be."""

    run: str
    records: int  # files
    copies: int  # of these, files of checkpoints
    copy_bytes: int
    dry_run: bool = False


def forget(view: RunView, *, force: bool = False, dry_run: bool = False) -> Forgotten:
    """Remove the records of a run that has nothing else, and its empty folder. A daemon watches it no longer.

    `force`: remove the copies of checkpoints in the records, too.

    Raises:
        NotFoundError: there are no records.
        BusyError: files of the run are left, it is being trained, or its records hold copies and there is no `force`.
    """
    run = view.run
    left = _files_of(run, view)
    if left:
        raise BusyError(
            f"{run.url} is still there: it has {left[0]}" + (f" and {len(left) - 1} more files" * (len(left) > 1)),
            hint="remove the run first (rm -rf RUN)",
        )
    records = records_of(run)
    if not records:
        raise NotFoundError(f"{run.url} has no records", hint="check the path, and the setting records")
    if any(not surely_gone(run, one) for one in list_trainings(run)):
        raise BusyError(f"a training of {run.url} is still running", hint="end it first")
    copies = [e for e in records if e.key.partition("/")[0] in _COPIES and is_file_of_checkpoint(e)]
    size = sum(e.size for e in copies)
    if copies and not (force or dry_run):
        raise BusyError(
            f"the records of {run.url} hold {len(copies)} files of checkpoints ({size} bytes), which would be removed",
            hint=f"`ckptguard restore RUN` copies what is good; {FORCE} removes them",
        )
    if not dry_run:
        remove_records(run)
    return Forgotten(run=run.url, records=len(records), copies=len(copies), copy_bytes=size, dry_run=dry_run)


def _files_of(run: Run, view: RunView) -> list[str]:
    try:
        return [entry.key for entry in view.entries]
    except ObjectMissingError:
        return []


def records_of(run: Run) -> list[Entry]:
    """Return all files of a run's records, wherever these are."""
    try:
        found = run.records.list("", recursive=True)
    except ObjectMissingError:
        return []
    if run.records_inside:
        return found
    if not says_whose(run):
        return []  # a user's folder, or records of a run that has this path no more
    keys = set(records_in(run.records))
    return [entry for entry in found if entry.key in keys]


def is_file_of_checkpoint(entry: Entry) -> bool:
    """True if this is no mark of ours: <kind>/<series>/<id>/<path>."""
    return entry.key.count("/") >= 3
