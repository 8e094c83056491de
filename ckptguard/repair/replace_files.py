"""Replace single damaged files: stage the right bytes, read them back, then exchange the files by rename.

Nothing is ever overwritten. The damaged file goes to quarantine, and the staged one takes its name. Both happen in one
step if the file system can exchange files. Elsewhere the name is free for a moment. If the process is killed then,
the next repair finds the staged file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError, ObjectExistsError, ObjectMissingError, StorageError
from ckptguard.records.run import Run
from ckptguard.runs.removal import remove_record, remove_temporary
from ckptguard.runs.settling import is_old
from ckptguard.scan.reread import reread
from ckptguard.storage import Entry, Storage
from ckptguard.storage.local.writes import swap_files
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import is_safe_path
from ckptguard.values.manifest import File
from ckptguard.values.temporary_names import REPAIR, REPAIR_OF_COPY

LINKED = "the kept copy is a hard link to the damaged file"
_BLOCK = 4 << 20


class CopySource(msgspec.Struct, frozen=True):
    """Another place with a generation's files, under `prefix` plus their paths in the run. `storage` belongs to this
    run, its records, or another run."""

    name: str
    storage: Storage
    prefix: str = ""
    near: bool = True  # on the same file system as the damaged file: equal inodes are one file

    def key(self, file: str) -> str:
        """Return the key of a file there."""
        return self.prefix + file


class Damaged(msgspec.Struct, frozen=True):
    """One file to repair: its `key` in `storage`, and its entry when it was checked."""

    file: File
    storage: Storage
    key: str
    seen: Entry | None


def whole_source(damaged: Damaged, sources: Sequence[CopySource]) -> tuple[CopySource | None, str]:
    """Return the first source with the right bytes of a file, read now from the disk; else why none has them."""
    reasons = []
    for source in sources:
        key = source.key(damaged.file.path)
        entry = find_entry(source.storage, key) if source.near else None
        if entry is not None and damaged.seen is not None and entry.inode == damaged.seen.inode is not None:
            reasons.append(LINKED)
            continue
        try:
            wrong = reread(source.storage, key, damaged.file)
        except CouldNotTellError as error:
            reasons.append(f"the {source.name} cannot be read: {error.message}")
            continue
        if wrong is None:
            return source, ""
        reasons.append(f"in the {source.name} {wrong.message}")
    return None, "; ".join(reasons)


@dataclass
class Staged:
    """Where files are staged. `needed`: a name is free until its staged file takes it."""

    prefix: str
    needed: bool = False


@contextlib.contextmanager
def staging(run: Run, storage: Storage) -> Iterator[Staged]:
    """Make a place for staged files, in the run or its records. It is removed at the end, unless it is still needed."""
    folder = (REPAIR_OF_COPY if storage is run.records else REPAIR).new()
    staged = Staged(folder + "/")
    try:
        yield staged
    finally:
        if not staged.needed:
            with contextlib.suppress(CouldNotTellError):  # the next repair finds it
                remove_temporary(storage, folder)


def stage(run: Run, damaged: Damaged, source: CopySource, prefix: str, *, how: str) -> str | None:
    """Copy a file to the staging place, and read it back. Returns what is wrong with it, or None.

    The copy is never a link: changes to one file must not reach the other. StorageFullError leaves nothing there.
    """
    target = prefix + damaged.file.path
    _copy(run, source, damaged, target, how)
    wrong = reread(damaged.storage, target, damaged.file)
    return None if wrong is None else f"{damaged.file.path} was not copied correctly: {wrong.message}"


def exchange(run: Run, damaged: Damaged, prefix: str, aside: str) -> None:
    """Move the damaged file to `aside`, a folder in the records, and the staged file to its name.

    Raises BusyError if another process saved a file there meanwhile. That file is not lost.
    """
    seen, staged, target = damaged.seen, prefix + damaged.file.path, f"{aside}/{damaged.file.path}"
    now = find_entry(damaged.storage, damaged.key)
    if (now and now.signature) != (seen and seen.signature):
        raise BusyError(f"{damaged.file.path} changed while it was repaired")
    if _swapped(run, damaged, staged, target):
        return
    if seen is not None:
        _to_records(run, damaged, target)
    try:
        damaged.storage.move(staged, damaged.key)
    except ObjectExistsError:
        raise BusyError(f"{damaged.file.path} was saved again while it was repaired") from None


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


def _copy(run: Run, source: CopySource, damaged: Damaged, target: str, how: str) -> None:
    own = (run.storage, run.records)
    if source.storage in own and damaged.storage in own:
        storage, run_prefix, records_prefix = run.shared()
        begin, end = (run_prefix if s is run.storage else records_prefix for s in (source.storage, damaged.storage))
        storage.copy(begin + source.key(damaged.file.path), end + target, how=how)
        return
    with source.storage.open(source.key(damaged.file.path)) as reader, damaged.storage.upload(target) as upload:
        for offset in range(0, reader.entry.size, _BLOCK):
            upload.write(reader.read(offset, min(_BLOCK, reader.entry.size - offset)))
        reader.check_unchanged()
        upload.commit()


def _swapped(run: Run, damaged: Damaged, staged: str, target: str) -> bool:
    """Link the damaged file to `target`, then exchange the two files in one step. False, without a change, if that is
    impossible."""
    root, seen = damaged.storage.root, damaged.seen
    if root is None or seen is None or seen.kind != "file":
        return False
    storage, run_prefix, records_prefix = run.shared()
    begin = records_prefix if damaged.storage is run.records else run_prefix
    try:
        storage.copy(begin + damaged.key, records_prefix + target, how="link")
    except StorageError:
        return False
    if not swap_files(root, staged, damaged.key):
        remove_record(run, target)
        return False
    out = find_entry(damaged.storage, staged)
    if out is None or out.signature != seen.signature:
        swap_files(root, staged, damaged.key)
        remove_record(run, target)
        raise BusyError(f"{damaged.file.path} was saved again while it was repaired")
    remove_temporary(damaged.storage, staged)
    return True


def _to_records(run: Run, damaged: Damaged, target: str) -> None:
    storage, run_prefix, records_prefix = run.shared()
    begin = records_prefix if damaged.storage is run.records else run_prefix
    storage.move(begin + damaged.key, records_prefix + target)
    moved = storage.stat(records_prefix + target)
    assert damaged.seen is not None
    if storage.root is not None and moved.signature != damaged.seen.signature:
        storage.move(records_prefix + target, begin + damaged.key)  # a trainer saved between the check and the move
        raise BusyError(f"{damaged.file.path} was saved again while it was repaired")
