"""Trash: remove a checkpoint from a run so that it can be restored until its grace period is over.

A local run renames the files. On an object store, where a move copies all bytes, they stay and are marked. Every step
may be killed: the mark comes first, so an unfinished removal is known. It is finished or undone under the run's lock
before anything else is removed.

Files moved aside have the same grace period: damaged files without use, and files restored too late.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from functools import partial

import msgspec

from ckptguard.errors import ChangedWhileReadError, CkptguardError, DeniedError, ObjectExistsError, ObjectMissingError
from ckptguard.layouts import Checkpoint, tops
from ckptguard.records.kept import read_set_aside
from ckptguard.records.manifests import read_manifest, sealed_generations, write_manifest
from ckptguard.records.pins import list_pins
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run, list_records
from ckptguard.records.trash import (
    MARKED,
    MOVED,
    Trashed,
    forget_trashed,
    is_taken,
    mark_taken,
    mark_trashed,
    read_trash,
    remove_unmarked,
    unmark_taken,
)
from ckptguard.records.who_and_when import (
    forget_sightings,
    passed_since,
    seen_for,
    stated_moment,
    this_host,
    this_moment,
    utc_text,
)
from ckptguard.runs.find_known_good import Wanted, known_good_candidates
from ckptguard.runs.publish import Place, copy_within, move_within, swap_within
from ckptguard.runs.removal import (
    holds_checkpoints,
    remove_empty_folders,
    remove_irregular,
    remove_leftover,
    remove_record,
    remove_unchanged,
)
from ckptguard.runs.run_view import RunView
from ckptguard.storage.protocol import Entry, find_entry
from ckptguard.values.ids import CheckpointId, escape, id_from_record
from ckptguard.values.manifest import Manifest
from ckptguard.values.temporary_names import REPLACED
from ckptguard.values.verdict import Outcome

_DAMAGED = re.compile(r"(?P<id>.+)\.damaged-[0-9a-f]{8}")


def throw_away(run: Run, checkpoint: Checkpoint, id: CheckpointId) -> bool:
    """Move a checkpoint in place to the trash under an id. False if another process did. The caller holds the lock."""
    now = this_moment()
    mark = Trashed(
        **msgspec.structs.asdict(id),
        path=checkpoint.path,
        how=MOVED if moves_files(run) else MARKED,
        files=(*checkpoint.files, *(e.key for e in checkpoint.irregular)),
        signature=tuple((e.key, *e.signature) for e in checkpoint.entries),
        bytes=checkpoint.bytes,
        removed_at=utc_text(now.wall),
        host=now.host,
        boot_id=now.boot_id,
        uptime=now.uptime,
    )
    if not mark_trashed(run, mark):
        return False
    if mark.how == MOVED:
        remove_record(run, mark.folder)  # without a mark it belongs to nobody
        for top in tops(mark.path, mark.files):
            with contextlib.suppress(ObjectMissingError):  # deleted by the trainer meanwhile
                move_within(run, Place(run.storage), Place(run.records, mark.folder + "/"), top)
        mark_taken(run, mark)
    return True


def begin_thinning(
    run: Run, checkpoint: Checkpoint, id: CheckpointId, thinned: Manifest, staged: Place | None = None
) -> Trashed | None:
    """Record that a checkpoint in place loses what only a resume needs, and seal what stays, which was read just now.
    Files that were `staged`, because they are written anew, wait in the trash.

    None if another process removes it. Nothing went: `finish_thinning` takes the files. After a kill, `settle_trash`
    undoes it if nothing was sealed, else it finishes. The whole checkpoint can be restored from the trash, so what
    stays is linked there. The caller holds the lock. Raises BusyError if another process sealed it, DeniedError if it
    cannot be linked. After any error all is as before.
    """
    now, goes = this_moment(), {path: size for path, size, *_ in thinned.thinned}
    mark = Trashed(
        **msgspec.structs.asdict(id),
        path=checkpoint.path,
        how=MOVED,
        files=checkpoint.files,
        signature=tuple((e.key, *e.signature) for e in checkpoint.entries),
        bytes=sum(goes.values()),
        removed_at=utc_text(now.wall),
        host=now.host,
        boot_id=now.boot_id,
        uptime=now.uptime,
        becomes=thinned.generation,
        stays=tuple(key for key in checkpoint.files if key not in goes),
    )
    if not mark_trashed(run, mark):
        return None
    try:
        remove_record(run, mark.folder)  # without a mark it belongs to nobody
        for entry in sorted(checkpoint.entries, key=lambda entry: entry.size):
            if entry.key in mark.stays:
                _link_into_trash(run, mark, entry.key)
        if staged is not None:
            for key in _anew(thinned):
                move_within(run, staged, Place(run.records, mark.folder + "/"), key)
        write_manifest(run, thinned)
    except CkptguardError:
        with contextlib.suppress(CkptguardError):
            settle_thinning(run, mark)
        raise
    return mark


def _link_into_trash(run: Run, mark: Trashed, path: str) -> None:
    """Link what stays in place. Raises DeniedError if only a copy can be made: that would take the room of a whole
    one."""
    how = copy_within(run, Place(run.storage), Place(run.records, mark.folder + "/"), path, how="link")
    if how == "copy":
        raise DeniedError(f"{escape(path)} cannot be linked into the trash", key=path)


def finish_thinning(run: Run, mark: Trashed, thinned: Manifest, *, saved_anew: bool = False) -> None:
    """Take the files of a checkpoint that was sealed without them to the trash. If it is killed, repeat it.

    A file that was written anew changes places with the old one in one step. If the checkpoint was `saved_anew` since,
    the new save may use the files that are left: the trash gets links of them.
    """
    trash, anew = Place(run.records, mark.folder + "/"), _anew(thinned)
    goes = {key: tuple(signature) for key, *signature in mark.signature if key not in mark.stays}
    for key, signature in goes.items():
        entry, waits = find_entry(run.storage, key), key in anew and _signature(trash.entry(key)) == anew[key]
        if entry is None or entry.signature != signature:  # it is there already, or was saved again
            if waits:
                remove_record(run, trash.key(key))
        elif waits and not saved_anew:
            _exchange(run, trash, key, signature)
        else:
            if waits:
                remove_record(run, trash.key(key))
            if saved_anew:
                copy_within(run, Place(run.storage), trash, key, how="link")
            else:
                move_within(run, Place(run.storage), trash, key)
    mark_taken(run, mark)
    for folder in {key.rpartition("/")[0] for key in goes}:
        if folder.startswith(f"{mark.path}/"):  # around the checkpoint all is the user's, or of our records
            remove_empty_folders(run.storage, folder)


def _signature(entry: Entry | None) -> tuple[object, ...] | None:
    return None if entry is None else entry.signature


def _anew(thinned: Manifest) -> dict[str, tuple[object, ...]]:
    """Return the signatures of the files that were written anew, by their paths."""
    taken = {path for path, *_ in thinned.thinned}
    return {file.path: file.signature for file in thinned.files if file.path in taken}


def _exchange(run: Run, trash: Place, key: str, signature: tuple[object, ...]) -> None:
    """Exchange a file with the one that waits in the trash. What somebody saved in this moment stays in place."""
    if not swap_within(run, trash, Place(run.storage), key):
        raise DeniedError(f"{escape(key)} cannot be exchanged with the file that was written anew", key=key)
    out = trash.entry(key)
    if out is None or out.signature != signature:
        swap_within(run, trash, Place(run.storage), key)
        remove_record(run, trash.key(key))


def undo_thinning(run: Run, mark: Trashed, whole: Manifest) -> None:
    """Put a thinned checkpoint back as it was, and seal it so. If it is killed before that, it is thinned again. The
    caller holds the lock, and has read what is in the trash.

    Raises ChangedWhileReadError if other files are in place; then some may be back, and go again.
    """
    thinned = read_manifest(run, msgspec.structs.replace(mark.id, generation=mark.becomes))
    trash, anew = Place(run.records, mark.folder + "/"), {} if thinned is None else _anew(thinned)
    unmark_taken(run, mark)
    for key, *signature in mark.signature:
        entry = find_entry(run.storage, key)
        if key in mark.stays or (entry is not None and entry.signature == tuple(signature)):
            continue
        if entry is None:
            move_within(run, trash, Place(run.storage), key)
        elif _signature(entry) != anew.get(key) or not swap_within(run, trash, Place(run.storage), key):
            raise ChangedWhileReadError(f"{escape(key)} changed while it was put back", key=key)
    write_manifest(run, whole)
    forget_trashed(run, mark)


def settle_thinning(run: Run, mark: Trashed) -> None:
    """Finish a thinning that was interrupted, or undo it if what stays was not sealed: then nothing has moved.

    The generation may be another one: somebody saved the checkpoint again, or added to it, and verified it first.
    """
    thinned = read_manifest(run, msgspec.structs.replace(mark.id, generation=mark.becomes))
    goes = tuple(one for one in mark.signature if one[0] not in mark.stays)
    if thinned is None or set(thinned.thinned) != set(goes):
        forget_trashed(run, mark)
        return
    own = (id.generation for id in sealed_generations(run, mark.series) if id.step == mark.step)
    finish_thinning(run, mark, thinned, saved_anew=max(own) > mark.becomes)


def moves_files(run: Run) -> bool:
    """True if a checkpoint can be renamed into the trash."""
    if run.storage.root is None or run.records.root is None:
        return False
    return os.stat(run.storage.root).st_dev == os.stat(run.records.root).st_dev


def settle_trash(run: Run) -> None:
    """Finish or undo what a crash interrupted, so that the trash is whole. The caller holds the lock."""
    remove_unmarked(run)
    for mark in read_trash(run):
        if is_taken(run, mark) == (mark.how == MOVED):
            continue
        if mark.becomes:
            settle_thinning(run, mark)
            continue
        left = list(_left_in_place(run, mark))
        if mark.how == MARKED:  # killed while it was deleted
            if len(left) == len(mark.signature):
                unmark_taken(run, mark)  # nothing was deleted yet: decide again
            else:
                delete_for_good(run, mark)
            continue
        moved = run.records.list(mark.folder, recursive=True)
        if moved and not left:
            mark_taken(run, mark)
            continue
        for entry in moved:  # moved in part: move it back
            _put_back(run, mark, entry.key)
        forget_trashed(run, mark)


def _left_in_place(run: Run, mark: Trashed) -> Iterator[str]:
    """Yield the marked files that are still in place. Another file under such a name is not ours."""
    for key, *signature in mark.signature:
        entry = find_entry(run.storage, key)
        if entry is not None and entry.signature == tuple(signature):
            yield key


def delete_for_good(run: Run, mark: Trashed) -> None:
    """Delete a generation's files from the trash, or in place. If it is killed, repeat it."""
    if mark.how == MARKED and not _is_saved_anew(run, mark):
        mark_taken(run, mark)
        for key, *signature in mark.signature:  # each is checked right before
            remove_unchanged(run, key, tuple(signature))
        for key in {*mark.files} - {key for key, *_ in mark.signature}:
            remove_irregular(run, key)
        if mark.path not in mark.files:
            remove_empty_folders(run.storage, mark.path)
    forget_trashed(run, mark)


def _is_saved_anew(run: Run, mark: Trashed) -> bool:
    """True if other files are in place under its names: a newer save, which may still use some of the old ones."""
    now = ((tuple(signature), find_entry(run.storage, key)) for key, *signature in mark.signature)
    return any(entry is not None and entry.signature != signature for signature, entry in now)


def in_trash_for(run: Run, mark: Trashed) -> float:
    """Return for how many seconds it has certainly been there, by a clock that nobody can set."""
    return passed_since(run, mark.folder, stated_moment(mark.removed_at, mark.host, mark.boot_id, mark.uptime))


def _put_back(run: Run, mark: Trashed, key: str) -> None:
    trash, path = Place(run.records, mark.folder + "/"), key.removeprefix(mark.folder + "/")
    try:
        move_within(run, trash, Place(run.storage), path)
    except ObjectExistsError:  # saved again meanwhile: the file in place is newer
        move_within(run, trash, Place(run.storage, REPLACED.new() + "/"), path)


def expire_aside(view: RunView, grace: float) -> list[str]:
    """Remove damaged files whose checkpoint has been good again for `grace` seconds. Returns their keys.

    The same goes for files that came back from the trash after their path was used again. The damaged files of a
    checkpoint that is not good stay. This machine's own clock measures the time since this function first saw them so.
    It also notes other machines' marks and pins. The caller holds the run's lock.
    """
    run = view.run
    damaged = {key for key, id in _damaged(run) if _has_no_use(view, key, id)}
    replaced: dict[str, Entry] = {}
    with contextlib.suppress(ObjectMissingError):
        replaced = {entry.key: entry for entry in run.storage.list("") if REPLACED.fits(entry.name, entry.kind)}
    removed = []
    for key in sorted({*damaged, *replaced}):
        if (seen_for(run, key, note=True) or 0.0) > grace:
            if key in damaged:
                remove_record(run, key)
                removed.append(key)
            elif remove_leftover(run.storage, replaced[key], (REPLACED,), holds=partial(holds_checkpoints, view, key)):
                removed.append(key)
    elsewhere = _marks_of_others(run)
    for key in elsewhere:
        seen_for(run, key, note=True)
    forget_sightings(run, ({*damaged, *replaced, *elsewhere}) - set(removed))
    return removed


def _damaged(run: Run) -> list[tuple[str, CheckpointId]]:
    """Return every folder of damaged files: its key, and the checkpoint that they belonged to."""
    found = []
    for folder in list_records(run, QUARANTINE):
        for name in list_records(run, f"{QUARANTINE}/{folder}"):
            match = _DAMAGED.fullmatch(name)
            id = id_from_record(folder, match["id"]) if match else None
            if id is not None:
                found.append((f"{QUARANTINE}/{folder}/{name}", id))
    return found


def _has_no_use(view: RunView, place: str, id: CheckpointId) -> bool:
    """True if the checkpoint is good without these files, and was seen whole since they were moved aside."""
    known = view.history.current_verdict(id)
    if known is None or known.outcome is not Outcome.GOOD or read_set_aside(view.run, id) is not None:
        return False
    if seen_for(view.run, place) is not None:
        return True
    newer = (other for other in view.history.ordered(id.series) if other.order > id.order)
    wanted = Wanted(series=id.series, exclude=frozenset(newer), sure=True, thinned=True)
    return any(candidate.id == id for candidate in itertools.islice(known_good_candidates(view, wanted), 2))


def _marks_of_others(run: Run) -> set[str]:
    """Return the marks of other machines, or of this one before its last boot. Our clock does not know their age."""
    boot_id = this_host()[1]
    pins = {p.key for p in list_pins(run) if p.until is not None and p.owner.boot_id != boot_id}
    return pins | {mark.folder for mark in read_trash(run) if mark.boot_id != boot_id}
