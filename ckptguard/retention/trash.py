"""Trash: take a checkpoint out of a run so that it can still be restored, until its time of grace is over.

Locally its files are moved by rename. On an object store, where a move is a copy of all bytes, they stay in place and
are marked. Every step can be killed. The mark comes first, so what was begun is known. It is finished or undone under
the run's lock before anything else is removed.
"""

from __future__ import annotations

import contextlib
import os
import uuid

from ckptguard.errors import ObjectExistsError, ObjectMissingError
from ckptguard.layouts import Checkpoint, tops
from ckptguard.records.run import Run
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
from ckptguard.records.who_and_when import passed_since, stated_moment, this_moment, utc_text
from ckptguard.values.ids import CheckpointId


def throw_away(run: Run, checkpoint: Checkpoint, id: CheckpointId) -> bool:
    """Put a checkpoint in place into the trash under an id; False if another process did. The caller holds the lock."""
    now = this_moment()
    mark = Trashed(
        series=id.series,
        step=id.step,
        generation=id.generation,
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
        run.records.remove(mark.folder)  # without a mark it was nobody's
        storage, run_prefix, records_prefix = run.shared()
        for top in tops(mark.path, mark.files):
            try:
                storage.move(run_prefix + top, f"{records_prefix}{mark.folder}/{top}")
            except ObjectMissingError:
                continue  # rotated away meanwhile
        mark_taken(run, mark)
    return True


def moves_files(run: Run) -> bool:
    """Whether a checkpoint can be moved to the trash by rename."""
    if run.storage.root is None or run.records.root is None:
        return False
    return os.stat(run.storage.root).st_dev == os.stat(run.records.root).st_dev


def settle_trash(run: Run) -> None:
    """Finish or undo what a crash cut short, so that what is in the trash is whole. The caller holds the lock."""
    remove_unmarked(run)
    for mark in read_trash(run):
        taken = is_taken(run, mark)
        if taken == (mark.how == MOVED):
            continue
        left = [key for key, *signature in mark.signature if is_as_marked(run, key, *signature)]
        if mark.how == MARKED:  # killed while it was removed for good
            if len(left) == len(mark.signature):
                unmark_taken(run, mark)  # nothing was removed yet: it is decided anew
            else:
                delete_for_good(run, mark)
            continue
        moved = run.records.list(mark.folder, recursive=True)
        if moved and not left:
            mark_taken(run, mark)
            continue
        for entry in moved:  # in part: back with it
            _put_back(run, mark, entry.key)
        forget_trashed(run, mark)


def is_as_marked(run: Run, key: str, *signature: object) -> bool:
    """Whether the file that was meant still lies in place: another one of that name is none of ours."""
    try:
        return run.storage.stat(key).signature == signature
    except ObjectMissingError:
        return False


def delete_for_good(run: Run, mark: Trashed) -> None:
    """Remove a generation's files from the trash, or from their place. Killed, it is done again."""
    if mark.how == MARKED and not _is_saved_anew(run, mark):
        mark_taken(run, mark)
        sealed = {key for key, *_ in mark.signature}
        for key, *signature in mark.signature:
            if is_as_marked(run, key, *signature):
                run.storage.remove(key)
        for key in mark.files:
            if key not in sealed and _is_irregular(run, key):
                run.storage.remove(key)
        _remove_empty(run, mark)
    forget_trashed(run, mark)


def _is_saved_anew(run: Run, mark: Trashed) -> bool:
    """Whether other files lie in place under its names: a newer save, which may still be using some of the old ones."""
    for key, *signature in mark.signature:
        try:
            if run.storage.stat(key).signature != tuple(signature):
                return True
        except ObjectMissingError:
            continue  # removed before a crash
    return False


def _is_irregular(run: Run, key: str) -> bool:
    try:
        return run.storage.stat(key).kind not in ("file", "folder")
    except ObjectMissingError:
        return False


def _remove_empty(run: Run, mark: Trashed) -> None:
    """Remove the folder in place, if nothing is left in it."""
    if mark.path in mark.files:
        return
    if run.storage.root is None:
        if not run.storage.list(mark.path, recursive=True):
            run.storage.remove(mark.path)
        return
    for folder, _, _ in os.walk(os.path.join(run.storage.root, *mark.path.split("/")), topdown=False):
        with contextlib.suppress(OSError):  # it holds something that is none of ours
            os.rmdir(folder)


def in_trash_for(run: Run, mark: Trashed) -> float:
    """For how many seconds it has been there for sure, by a clock that nobody sets: that of the machine that removed
    it, or this one's since it saw it there first."""
    return passed_since(run, mark.folder, stated_moment(mark.removed_at, mark.host, mark.boot_id, mark.uptime))


def _put_back(run: Run, mark: Trashed, key: str) -> None:
    storage, run_prefix, records_prefix = run.shared()
    place = key.removeprefix(mark.folder + "/")
    try:
        storage.move(records_prefix + key, run_prefix + place)
    except ObjectExistsError:  # saved anew meanwhile: what lies there is newer
        storage.move(records_prefix + key, f"{run_prefix}tmp-replaced-{uuid.uuid4().hex[:8]}/{place}")
