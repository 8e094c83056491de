"""Replace single damaged files: stage the right bytes, read them back, then exchange the files by rename.

Nothing is ever overwritten. The damaged file goes to quarantine, and the staged one takes its name. Both happen in one
step if the file system can exchange files. Elsewhere the name is free for a moment. If the process is killed then,
the next repair finds the staged file.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError, ObjectExistsError, ObjectMissingError, StorageError
from ckptguard.records.run import Run
from ckptguard.runs.publish import Place, copy_within, move_within, publish_file
from ckptguard.runs.removal import remove_record, remove_temporary
from ckptguard.runs.settling import is_old
from ckptguard.scan.paced_reader import Pace
from ckptguard.scan.reread import reread
from ckptguard.storage import Entry, Storage
from ckptguard.storage.local.writes import swap_files
from ckptguard.values.ids import is_safe_path
from ckptguard.values.manifest import File
from ckptguard.values.temporary_names import REPAIR, REPAIR_OF_COPY

LINKED = "the kept copy is a hard link to the damaged file"


class CopySource(Place, frozen=True, kw_only=True):
    """Another place with a generation's files. `storage` belongs to this run, its records, or another run."""

    name: str
    near: bool = True  # on the same file system as the damaged file: equal inodes are one file


class Damaged(msgspec.Struct, frozen=True):
    """One file to repair, its place, and its entry when it was checked."""

    file: File
    place: Place
    seen: Entry | None

    @property
    def storage(self) -> Storage:
        """Where it is."""
        return self.place.storage

    @property
    def path(self) -> str:
        """Its path in the run."""
        return self.file.path

    def now(self) -> Entry | None:
        """Return what has its name now."""
        return self.place.entry(self.path)


def whole_source(damaged: Damaged, sources: Sequence[CopySource]) -> tuple[CopySource | None, str]:
    """Return the first source with the right bytes of a file, read now from the disk; else why none has them."""
    reasons = []
    for source in sources:
        entry = source.entry(damaged.path) if source.near else None
        if entry is not None and damaged.seen is not None and entry.inode == damaged.seen.inode is not None:
            reasons.append(LINKED)
            continue
        try:
            wrong = reread(source.storage, source.key(damaged.path), damaged.file)
        except CouldNotTellError as error:
            reasons.append(f"the {source.name} cannot be read: {error.message}")
            continue
        if wrong is None:
            return source, ""
        reasons.append(f"in the {source.name} {wrong.message}")
    return None, "; ".join(reasons)


def stage(run: Run, damaged: Damaged, source: CopySource, staged: Place, *, how: str) -> str | None:
    """Copy a file to the staging place, and read it back. Returns what is wrong with it, or None.

    The copy is never a link: changes to one file must not reach the other. StorageFullError leaves nothing there.
    """
    wrong = None
    if source.storage in (run.storage, run.records):
        copy_within(run, source, staged, damaged.path, how=how)
    else:
        wrong = publish_file(source, staged, damaged.file, Pace())
    if wrong is None:
        found = reread(staged.storage, staged.key(damaged.path), damaged.file)
        wrong = None if found is None else found.message
    return None if wrong is None else f"{damaged.path} was not copied correctly: {wrong}"


def exchange(run: Run, damaged: Damaged, staged: Place, folder: str) -> None:
    """Move the damaged file to a folder in the records, and the staged file to its name.

    Raises BusyError if another process saved a file there meanwhile. That file is not lost.
    """
    seen, now, aside = damaged.seen, damaged.now(), Place(run.records, folder + "/")
    if (now and now.signature) != (seen and seen.signature):
        raise BusyError(f"{damaged.path} changed while it was repaired")
    if _swapped(run, damaged, staged, aside):
        return
    if seen is not None:
        _move_aside(run, damaged, aside)
    try:
        move_within(run, staged, damaged.place, damaged.path)
    except ObjectExistsError:
        raise _saved_again(damaged) from None


def cut_short(run: Run) -> tuple[set[str], list[tuple[Storage, str]]]:
    """Return what killed repairs left: the files in place under repair, and the folders of their staged files.

    The caller holds the run's lock. Without a lock, only old folders count as abandoned.
    """
    files: set[str] = set()
    folders: list[tuple[Storage, str]] = []
    for storage, name in ((run.storage, REPAIR), (run.records, REPAIR_OF_COPY)):
        try:
            names = [e.key for e in storage.list("") if name.fits(e.name, e.kind)]
        except ObjectMissingError:
            continue
        for folder in names:
            staged = storage.list(folder, recursive=True)
            if storage.root is None and not is_old(storage, staged):
                continue
            folders.append((storage, folder))
            if storage is run.storage:
                paths = (entry.key.removeprefix(folder + "/") for entry in staged)
                files.update(path for path in paths if is_safe_path(path))
    return files, folders


def _swapped(run: Run, damaged: Damaged, staged: Place, aside: Place) -> bool:
    """Link the damaged file aside, then exchange it with the staged one in one step. False, without a change, if that
    is impossible."""
    root, seen = damaged.storage.root, damaged.seen
    if root is None or seen is None or seen.kind != "file":
        return False
    try:
        copy_within(run, damaged.place, aside, damaged.path, how="link")
    except StorageError:
        return False
    names = staged.key(damaged.path), damaged.place.key(damaged.path)
    if not swap_files(root, *names):
        remove_record(run, aside.key(damaged.path))
        return False
    out = staged.entry(damaged.path)
    if out is None or out.signature != seen.signature:
        swap_files(root, *names)
        remove_record(run, aside.key(damaged.path))
        raise _saved_again(damaged)
    remove_temporary(staged.storage, names[0])
    return True


def _move_aside(run: Run, damaged: Damaged, aside: Place) -> None:
    move_within(run, damaged.place, aside, damaged.path)
    moved = aside.entry(damaged.path)
    if damaged.storage.root is not None and (moved and moved.signature) != (damaged.seen and damaged.seen.signature):
        move_within(run, aside, damaged.place, damaged.path)  # a trainer saved between the check and the move
        raise _saved_again(damaged)


def _saved_again(damaged: Damaged) -> BusyError:
    return BusyError(f"{damaged.path} was saved again while it was repaired")
