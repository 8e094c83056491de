"""Clean: remove what ckptguard keeps in a run, but no copy of a checkpoint that exists nowhere else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError, NotFoundError
from ckptguard.inspect.list_states import survey
from ckptguard.keep.copies import release, shares_place
from ckptguard.records.daemon_record import read_daemon_record, surely_ended
from ckptguard.records.kept import FOLDER as KEPT
from ckptguard.records.kept import read_kept, read_set_aside
from ckptguard.records.leases import list_claims, list_trainings, surely_gone
from ckptguard.records.manifests import read_manifest
from ckptguard.records.nodes import is_led
from ckptguard.records.pins import IN_USE, counts, list_pins
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run
from ckptguard.records.trash import FOLDER as TRASH
from ckptguard.retention.forget import is_file_of_checkpoint, records_of
from ckptguard.runs.lock import run_lock
from ckptguard.runs.removal import remove_record, remove_records
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan.paced_reader import Pace
from ckptguard.scan.reread import reread
from ckptguard.storage import Entry
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import CheckpointId, id_from_record
from ckptguard.values.manifest import Manifest
from ckptguard.values.temporary_names import LEFT_IN_RECORDS
from ckptguard.values.verdict import Outcome

_RECORDS = "records"
_BESIDE = "training"  # random numbers and the position in the data, of checkpoints that the user's own code writes
_KINDS = (KEPT, QUARANTINE, TRASH, _BESIDE, _RECORDS)
Right = dict[CheckpointId, list[Entry]]  # the files in place that were read and right, as storage described them then


class CleanedKind(msgspec.Struct, frozen=True, kw_only=True):
    """Files of one kind: "kept", "quarantine" and "trash" are of checkpoints, "training" is their data position and
    random numbers, and "records" all the rest. `bytes` is the space that their removal frees; a hard link frees none.
    """

    kind: str
    files: int
    bytes: int


class Cleaned(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed of a run, or would be. `stays`: what exists nowhere else, and the records about it. `only`: the
    files of checkpoints under `removed` that exist nowhere else. `reasons`: why copies stay although something is in
    place, a sentence for each checkpoint."""

    run: str
    removed: tuple[CleanedKind, ...]
    stays: tuple[CleanedKind, ...]
    dry_run: bool = False
    only: tuple[CleanedKind, ...] = ()
    reasons: tuple[str, ...] = ()


def clean(
    view: RunView,
    *,
    everything: bool = False,
    dry_run: bool = False,
    used: Callable[[], bool] = lambda: False,
    work: Work = PLAIN,
    right: Right | None = None,
) -> Cleaned:
    """Remove our records and copies from a run. Its checkpoints stay as they are.

    A kept copy goes if its checkpoint is in place, good, and as sealed: that is read, unless the copy is a link to the
    same bytes. All other files of checkpoints exist nowhere else, as far as is known: they stay, and so do the records,
    unless `everything` goes. `used` says whether something without a record uses the run. What was read is noted in
    `right`, and another call with that reads it only if it changed. After a kill the run can be read, and this can be
    repeated.

    Raises:
        NotFoundError: there are no records.
        BusyError: a daemon or a training uses the run, or something reads its copies.
        CouldNotTellError: it could not be found out which copies exist elsewhere. Nothing was removed.
    """
    run, right = view.run, {} if right is None else right
    _records_to_clean(run)
    _refuse_in_use(run, used)
    # Before the lock, which a training that begins now may want: reading takes long.
    reasons = () if everything else tuple(_read_in_place(view, right, work))
    view.forget()
    with contextlib.nullcontext() if dry_run else run_lock(run):
        _refuse_in_use(run, used)
        entries = _records_to_clean(run)
        in_place = set[CheckpointId]()
        with contextlib.suppress(*(CouldNotTellError,) * everything):  # damaged records can be removed, too
            in_place = _in_place(view)
        double = set() if everything else {id for id in in_place if id in right and _are_still(run, right[id])}
        alone = not everything and any(_is_alone(entry, double) for entry in entries)
        gone = [entry for entry in entries if not alone or _id_of(entry) in double]
        done = Cleaned(
            run=run.url,
            removed=_kinds(run, gone),
            stays=_kinds(run, [entry for entry in entries if alone and _id_of(entry) not in double]),
            dry_run=dry_run,
            only=_kinds(run, [entry for entry in entries if everything and _is_alone(entry, in_place)]),
            reasons=reasons,
        )
        if not dry_run:
            for id in sorted({id for entry in gone if (id := _id_of(entry)) in double}, key=str):
                release(run, id)  # first: without manifests nobody knows that it is in place, too
            if not alone:
                _remove_all(run, entries)
    return done


def _records_to_clean(run: Run) -> list[Entry]:
    found = records_of(run)
    if not found:
        raise NotFoundError(f"{run.url} has no records", hint="check the path, and the setting records")
    return [entry for entry in found if entry.kind != "folder"]


def _refuse_in_use(run: Run, used: Callable[[], bool]) -> None:
    """Raise BusyError while removing the records could take them from somebody."""
    daemon = read_daemon_record(run)
    if daemon is not None and not surely_ended(daemon):
        where = f"process {daemon.pid} of {daemon.host}"
        hint = f"stop it first; if it was killed on another machine: remove {run.usable_record('daemon.json')}"
        raise BusyError(f"a daemon guards {run.url} ({where})", hint=hint)
    training = any(not surely_gone(run, one) for one in (*list_trainings(run), *list_claims(run)))
    if training or is_led(run) or used():
        raise BusyError(f"a training of {run.url} is still running", hint="end it first")
    using = [pin.note for pin in list_pins(run) if pin.reason == IN_USE and counts(run, pin)]
    if using:
        raise BusyError(f"copies of {run.url} are in use ({using[0]})", hint="try again when that has ended")


def _in_place(view: RunView) -> set[CheckpointId]:
    """Return the checkpoints whose files in place are good, and unchanged since that was found."""
    states = survey(view)
    return {s.id for s in states if s.id is not None and s.in_place and not s.changed and s.outcome is Outcome.GOOD}


def _read_in_place(view: RunView, right: Right, work: Work) -> Iterator[str]:
    """Read the files in place of which there are copies, and note in `right` those checkpoints that are as sealed.
    Yield a sentence about each other: unchanged sizes and times say nothing about its bytes."""
    run, pace = view.run, Pace(work.rate, progress=work.progress)
    copied = {id for entry in records_of(run) if (id := _id_of(entry)) is not None}
    for id in sorted(_in_place(view) & copied, key=str):
        path = str(id)
        try:
            if _are_still(run, right.get(id, [])):
                continue
            manifest = read_manifest(run, id)
            if manifest is None:
                wrong = "it is not known which bytes it had"
            else:
                path, now = manifest.path, [run.storage.now().stat(file.path) for file in manifest.files]
                wrong = _what_is_wrong(run, manifest, pace)
        except CouldNotTellError as error:
            wrong = error.message
        if wrong:
            right.pop(id, None)
            yield f"the protected copy of {path} stays: {wrong}"
        else:
            right[id] = now


def _what_is_wrong(run: Run, manifest: Manifest, pace: Pace) -> str:
    """Return which file in place is not as sealed, or "". A copy of links has the same bytes, right or not."""
    copy = read_kept(run, manifest.id) or read_set_aside(run, manifest.id)
    if copy is not None and shares_place(run, copy, copy.files):
        return ""
    found = (reread(run.storage, file.path, file, pace) for file in manifest.files)
    return next((f"in place {wrong.file} is wrong: {wrong.message}" for wrong in found if wrong is not None), "")


def _are_still(run: Run, entries: list[Entry]) -> bool:
    """True if storage describes these files in place as before, also if only their ctime could tell."""
    return bool(entries) and all(find_entry(run.storage.now(), entry.key) == entry for entry in entries)


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
