"""Publish files of a checkpoint in another place. They appear under their names only whole, and replace nothing else.

Between a run and its records the storage itself copies, links or renames. Other files are read once, and compared with
their manifest meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ckptguard.errors import ChangedWhileReadError, CouldNotTellError, StoppedError, StorageError
from ckptguard.layouts import tops
from ckptguard.records.run import Run
from ckptguard.runs.removal import remove_empty_folders, remove_folder_of_ours, remove_temporary
from ckptguard.storage import Storage
from ckptguard.storage.local.writes import swap_files
from ckptguard.storage.protocol import Entry, find_entry
from ckptguard.storage.read_ahead import IN_FLIGHT
from ckptguard.values.manifest import File
from ckptguard.values.temporary_names import TemporaryName

if TYPE_CHECKING:
    from ckptguard.scan.paced_reader import Pace

T = TypeVar("T")

FILES_AT_ONCE = 3  # others are read while one is opened or synced


class Place(msgspec.Struct, frozen=True):
    """Where the files of a checkpoint are: in `storage`, at `prefix` plus their paths in the run."""

    storage: Storage
    prefix: str = ""

    def key(self, path: str) -> str:
        """Return the key of a file there, or of the whole place."""
        return (self.prefix + path).rstrip("/")

    def entry(self, path: str) -> Entry | None:
        """Return the entry of a file there, or None."""
        return find_entry(self.storage, self.key(path))


def publish_file(
    source: Place,
    target: Place,
    file: File,
    pace: Pace,
    *,
    compare: bool = True,
    replace: bool = False,
    committing: contextlib.AbstractContextManager[object] | None = None,
    ahead: int = IN_FLIGHT,
) -> str | None:
    """Copy a sealed file, which is read once. Returns what is wrong with its bytes; then nothing was written.

    Without `compare` it is copied as it is. `replace` allows the target to exist. `committing` is entered while the
    copy gets its name, and may raise. `ahead`: how many requests to a store may be under way.

    Raises:
        ObjectExistsError: the target exists.
        ChangedWhileReadError: the source changed.
    """
    # Imported here, because a daemon that copies nothing does not need it.
    from ckptguard.scan.paced_reader import REMOTE_BLOCK, read_through
    from ckptguard.scan.sealed_stream import SealedStream
    from ckptguard.scan.thread_buffers import BLOCK

    stream = SealedStream(file) if compare else None
    remote = source.storage.root is None
    block = REMOTE_BLOCK if remote or target.storage.root is None else BLOCK
    with source.storage.open(source.key(file.path)) as reader:
        if stream is not None and reader.entry.size != file.size:
            return f"{file.path} has {reader.entry.size} bytes instead of {file.size}"
        with target.storage.upload(target.key(file.path), replace=replace) as upload:

            def take(block: bytes) -> None:
                if stream is not None:
                    stream.add(block)
                upload.write(block)

            read_through(reader, take, pace, block=block, remote=remote, ahead=ahead)
            reader.check_unchanged()
            wrong = stream.wrong() if stream is not None else None
            if wrong is None:
                with committing or contextlib.nullcontext():
                    upload.commit()
    return wrong


def for_each(files: Sequence[File], act: Callable[[File], T], over: threading.Event) -> list[T]:
    """Call `act` for the files, several at once, the largest first, and return the results.

    After an error none is begun, `over` is set, so that those under way can end, and the error is raised.
    """

    def one(file: File) -> T:
        if over.is_set():
            raise StoppedError("another file failed", key="")
        try:
            return act(file)
        except BaseException:
            over.set()
            raise

    with ThreadPoolExecutor(min(FILES_AT_ONCE, len(files) or 1), "ckptguard-publish") as threads:
        tasks = [threads.submit(one, file) for file in sorted(files, key=lambda file: -file.size)]
        try:
            wait(tasks)
        except BaseException:
            over.set()
            raise
    errors = [error for task in tasks if (error := task.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, StoppedError)), errors[0])
    return [task.result() for task in tasks]


@dataclass
class Staged:
    """A temporary place of files that get their names later. It stays if it is still `needed`."""

    place: Place
    needed: bool = False


@contextlib.contextmanager
def staging(storage: Storage, name: TemporaryName) -> Iterator[Staged]:
    """Make a temporary place, and remove it at the end. What cannot be removed is found later by its name."""
    folder = name.new()
    staged = Staged(Place(storage, folder + "/"))
    try:
        yield staged
    finally:
        if not staged.needed:
            try:
                remove_temporary(storage, folder)  # if it was published itself, it is gone
            except CouldNotTellError:
                if storage.root is not None:
                    remove_folder_of_ours(storage.path_of(folder), name)


def give_names(staged: Place, names: Iterable[tuple[str, str]]) -> None:
    """Move what was staged to other keys of its storage: all of it, or nothing after an error.

    Raises ObjectExistsError if one is taken.
    """
    storage = staged.storage
    moved: list[tuple[str, str, Entry | None]] = []
    try:
        for path, key in names:
            storage.move(staged.key(path), key)
            moved.append((staged.key(path), key, find_entry(storage, key)))
    except StorageError:
        for temporary, key, entry in moved:
            with contextlib.suppress(StorageError):
                if find_entry(storage, key) == entry:  # else another process has saved there: that stays
                    storage.move(key, temporary)
        raise


def give_names_of(staged: Place, path: str, files: Sequence[str], name: str) -> None:
    """Give the staged files of the checkpoint at `path` their names in the run, with `name` for the checkpoint itself.

    Raises ObjectExistsError as above.
    """
    lies = find_entry(staged.storage, name) if path not in files else None
    if lies is not None and lies.kind == "folder":  # a rotation may leave it without its files
        remove_empty_folders(staged.storage, name)
    give_names(staged, [(top, name if top == path else top) for top in tops(path, files)])


def copy_files_within(run: Run, source: Place, target: Place, files: Iterable[str]) -> None:
    """Copy files inside a run and its records. They are never links: what the trainer does to one must not reach
    another."""
    for file in files:
        copy_within(run, source, target, file, how="clone")


def copy_within(run: Run, source: Place, target: Place, path: str, *, how: str) -> str:
    """Copy a file inside a run and its records. Returns how it was done; see `Storage.copy`.

    Raises SettingsError if no storage contains both.
    """
    storage, begin, end = _together(run, source, target)
    return storage.copy(begin + path, end + path, how=how)


def duplicate_within(run: Run, source: Place, path: str, target: Place, name: str, size: int) -> bool:
    """Have the storage make a file of this size another one, too. False if it is not there, or the storage cannot.

    It is a server-side copy, a reflink or a hard link. No bytes pass through here, and nothing compares them.
    """
    storage, begin, end = _together(run, source, target)
    can = storage.copies_itself or storage.capabilities().links
    entry = find_entry(storage, begin + path) if can else None
    if entry is None or (entry.kind, entry.size) != ("file", size):
        return False
    with contextlib.suppress(StorageError, ChangedWhileReadError):
        storage.copy_listed(entry, end + name, how="link")
        return True
    return False


def move_within(run: Run, source: Place, target: Place, path: str) -> None:
    """Move a file or folder inside a run and its records; see `Storage.move`. Raises SettingsError as above."""
    storage, begin, end = _together(run, source, target)
    storage.move(begin + path, end + path)


def swap_within(run: Run, one: Place, other: Place, path: str) -> bool:
    """Exchange two files inside a run and its records in one step. False, without a change, if that is impossible."""
    storage, begin, end = _together(run, one, other)
    return storage.root is not None and swap_files(storage.root, begin + path, end + path)


def _together(run: Run, source: Place, target: Place) -> tuple[Storage, str, str]:
    """Return a storage that contains two places of a run, and their prefixes in it."""
    if source.storage is target.storage:
        return source.storage, source.prefix, target.prefix
    storage, run_prefix, records_prefix = run.shared()
    begin, end = (records_prefix if place.storage is run.records else run_prefix for place in (source, target))
    return storage, begin + source.prefix, end + target.prefix
