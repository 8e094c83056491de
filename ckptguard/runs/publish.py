"""Publish files of a checkpoint in another place. They appear under their names only whole, and replace nothing else.

Between a run and its records the storage itself copies, links or renames. Other files are read once, and compared with
their manifest meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ckptguard.records.run import Run
from ckptguard.storage import Storage
from ckptguard.storage.protocol import Entry, find_entry
from ckptguard.values.manifest import File

if TYPE_CHECKING:
    from ckptguard.scan.paced_reader import Pace

T = TypeVar("T")

_FILES_AT_ONCE = 3  # others are read while one is opened or synced


class Place(msgspec.Struct, frozen=True):
    """Where the files of a checkpoint are: in `storage`, at `prefix` plus their paths in the run."""

    storage: Storage
    prefix: str = ""

    def key(self, path: str) -> str:
        """Return the key of a file there."""
        return self.prefix + path

    def entry(self, path: str) -> Entry | None:
        """Return the entry of a file there, or None."""
        return find_entry(self.storage, self.key(path))


def publish_file(
    source: Place,
    target: Place,
    file: File,
    pace: Pace,
    *,
    replace: bool = False,
    committing: contextlib.AbstractContextManager[object] | None = None,
) -> str | None:
    """Copy a sealed file, which is read once. Returns what is wrong with its bytes; then nothing was written.

    `replace` allows the target to exist. `committing` is entered while the copy gets its name, and may raise.

    Raises:
        ObjectExistsError: the target exists.
        ChangedWhileReadError: the source changed.
    """
    # Imported here, because a daemon that copies nothing does not need it.
    from ckptguard.scan.paced_reader import REMOTE_BLOCK, read_through
    from ckptguard.scan.sealed_stream import SealedStream
    from ckptguard.scan.thread_buffers import BLOCK

    stream, remote = SealedStream(file), source.storage.root is None
    block = REMOTE_BLOCK if remote or target.storage.root is None else BLOCK
    with source.storage.open(source.key(file.path)) as reader:
        if reader.entry.size != file.size:
            return f"{file.path} has {reader.entry.size} bytes instead of {file.size}"
        with target.storage.upload(target.key(file.path), replace=replace) as upload:

            def take(block: bytes) -> None:
                stream.add(block)
                upload.write(block)

            read_through(reader, take, pace, block=block, remote=remote)
            reader.check_unchanged()
            wrong = stream.wrong()
            if wrong is None:
                with committing or contextlib.nullcontext():
                    upload.commit()
    return wrong


def for_each(files: Sequence[File], act: Callable[[File], T]) -> list[T]:
    """Call `act` for the files, several at once, the largest first. Returns the results. After an error none is begun,
    and it is raised."""
    largest_first = sorted(files, key=lambda file: -file.size)
    with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(files) or 1), "ckptguard-publish") as threads:
        tasks = [threads.submit(act, file) for file in largest_first]
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
    return [task.result() for task in tasks if not task.cancelled()]


def copy_within(run: Run, source: Place, target: Place, path: str, *, how: str) -> str:
    """Copy a file inside a run and its records. Returns how it was done; see `Storage.copy`.

    Raises SettingsError if no storage contains both.
    """
    storage, begin, end = _together(run, source, target)
    return storage.copy(begin + path, end + path, how=how)


def move_within(run: Run, source: Place, target: Place, path: str) -> None:
    """Move a file or folder inside a run and its records; see `Storage.move`. Raises SettingsError as above."""
    storage, begin, end = _together(run, source, target)
    storage.move(begin + path, end + path)


def _together(run: Run, source: Place, target: Place) -> tuple[Storage, str, str]:
    """Return a storage that contains two places of a run, and their prefixes in it."""
    if source.storage is target.storage:
        return source.storage, source.prefix, target.prefix
    storage, run_prefix, records_prefix = run.shared()
    begin, end = (records_prefix if place.storage is run.records else run_prefix for place in (source, target))
    return storage, begin + source.prefix, end + target.prefix
