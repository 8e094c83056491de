"""Clean: remove what ckptguard keeps in a run, but no copy of a checkpoint that exists nowhere else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

import msgspec

from ckptguard.errors import BusyError, NotFoundError
from ckptguard.inspect.list_states import survey
from ckptguard.keep.copies import release
from ckptguard.records.daemon_record import read_daemon_record, surely_ended
from ckptguard.records.kept import FOLDER as KEPT
from ckptguard.records.leases import list_claims, list_trainings, surely_gone
from ckptguard.records.pins import IN_USE, counts, list_pins
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run
from ckptguard.records.trash import FOLDER as TRASH
from ckptguard.retention.forget import is_file_of_checkpoint, records_of
from ckptguard.runs.lock import run_lock
from ckptguard.runs.removal import remove_record, remove_records
from ckptguard.runs.run_view import RunView
from ckptguard.storage import Entry
from ckptguard.values.ids import CheckpointId, id_from_record
from ckptguard.values.temporary_names import LEFT_IN_RECORDS
from ckptguard.values.verdict import Outcome

_RECORDS = "records"
_BESIDE = "training"  # random numbers and the position in the data, of checkpoints that the user's own code writes
_KINDS = (KEPT, QUARANTINE, TRASH, _BESIDE, _RECORDS)


class CleanedKind(msgspec.Struct, frozen=True, kw_only=True):
    """Files of one kind: "kept", "quarantine" and "trash" are of checkpoints, "training" is their data position and
    random numbers, and "records" all the rest. `bytes` is the space that their removal frees; a hard link frees none.
    """

    kind: str
    files: int
    bytes: int


class Cleaned(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed of a run, or would be. `stays`: what exists nowhere else, and the records about it."""

    run: str
    removed: tuple[CleanedKind, ...]
    stays: tuple[CleanedKind, ...]
    dry_run: bool = False


def clean(
    view: RunView, *, everything: bool = False, dry_run: bool = False, used: Callable[[], bool] = lambda: False
) -> Cleaned:
    """Remove our records and copies from a run. Its checkpoints stay as they are.

    A kept copy goes if its checkpoint is in place, good, and unchanged since that was found. All other files of
    checkpoints exist nowhere else, as far as is known: they stay, and so do the records, unless `everything` goes.
    `used` says whether something without a record uses the run. After a kill the run can be read, and this can be
    repeated.

    Raises:
        NotFoundError: there are no records.
        BusyError: a daemon or a training uses the run, or something reads its copies.
        CouldNotTellError: it could not be found out which copies exist elsewhere. Nothing was removed.
    """
    run = view.run
    if not records_of(run):
        raise NotFoundError(f"{run.url} has no records", hint="check the path, and the setting records")
    with contextlib.nullcontext() if dry_run else run_lock(run):
        _refuse_in_use(run, used)
        entries = [entry for entry in records_of(run) if entry.kind != "folder"]
        double = set() if everything else _in_place(view)
        alone = not everything and any(_is_alone(entry, double) for entry in entries)
        gone = [entry for entry in entries if not alone or _id_of(entry) in double]
        done = Cleaned(
            run=run.url,
            removed=_kinds(run, gone),
            stays=_kinds(run, [entry for entry in entries if alone and _id_of(entry) not in double]),
            dry_run=dry_run,
        )
        if not dry_run and alone:
            for id in sorted({id for entry in gone if (id := _id_of(entry)) is not None}, key=str):
                release(run, id)
        elif not dry_run:
            _remove_all(run, entries)
    return done


def _refuse_in_use(run: Run, used: Callable[[], bool]) -> None:
    """Raise BusyError while removing the records could take them from somebody."""
    daemon = read_daemon_record(run)
    if daemon is not None and not surely_ended(daemon):
        where = f"process {daemon.pid} of {daemon.host}"
        hint = f"stop it first; if it was killed on another machine: remove {run.usable_record('daemon.json')}"
        raise BusyError(f"a daemon guards {run.url} ({where})", hint=hint)
    if any(not surely_gone(run, one) for one in (*list_trainings(run), *list_claims(run))) or used():
        raise BusyError(f"a training of {run.url} is still running", hint="end it first")
    using = [pin.note for pin in list_pins(run) if pin.reason == IN_USE and counts(run, pin)]
    if using:
        raise BusyError(f"copies of {run.url} are in use ({using[0]})", hint="try again when that has ended")


def _in_place(view: RunView) -> set[CheckpointId]:
    """Return the checkpoints whose files in place are good, and unchanged since that was found."""
    states = survey(view)
    return {s.id for s in states if s.id is not None and s.in_place and not s.changed and s.outcome is Outcome.GOOD}


def _is_alone(entry: Entry, double: set[CheckpointId]) -> bool:
    """True if this is a file of a checkpoint that is in no other place."""
    unfinished = any(kind.fits(part) for part in entry.key.split("/") for kind in LEFT_IN_RECORDS)
    return _kind_of(entry) != _RECORDS and not unfinished and _id_of(entry) not in double


def _id_of(entry: Entry) -> CheckpointId | None:
    """Return the checkpoint that a file in a kept copy, or its mark, belongs to; None for all else."""
    top, folder, name, *_ = (*entry.key.split("/"), "", "")
    return id_from_record(folder, name.removesuffix(".json").removesuffix(".damaged")) if top == KEPT else None


def _kind_of(entry: Entry) -> str:
    top = entry.key.partition("/")[0]
    return top if top == _BESIDE or (top in _KINDS and is_file_of_checkpoint(entry)) else _RECORDS


def _kinds(run: Run, entries: Iterable[Entry]) -> tuple[CleanedKind, ...]:
    by_kind: dict[str, list[Entry]] = {kind: [] for kind in _KINDS}
    for entry in entries:
        by_kind[_kind_of(entry)].append(entry)
    sizes = ((kind, [_freed(run, entry) for entry in of]) for kind, of in by_kind.items() if of)
    return tuple(CleanedKind(kind=kind, files=len(of), bytes=sum(of)) for kind, of in sizes)


def _freed(run: Run, entry: Entry) -> int:
    if run.records.root is not None:
        with contextlib.suppress(OSError):
            return entry.size if os.lstat(run.usable_record(entry.key)).st_nlink < 2 else 0
    return entry.size


def _remove_all(run: Run, entries: Iterable[Entry]) -> None:
    """Remove all records, in an order in which none that is left says too much after a kill.

    First what verdicts are about: with half of its verdicts, something bad could count as good. Then the marks of
    copies, whose files would be missing.
    """
    remove_record(run, "manifests")
    for entry in entries:
        if entry.key.partition("/")[0] in (KEPT, QUARANTINE, TRASH) and _kind_of(entry) == _RECORDS:
            remove_record(run, entry.key)
    remove_records(run)
