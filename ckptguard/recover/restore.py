"""Restore: copy a checkpoint's files to a destination, verified, completely or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ckptguard.decisions.known_good import IN_PLACE, KEPT
from ckptguard.errors import (
    ChangedWhileReadError,
    CkptguardError,
    CouldNotTellError,
    DeniedError,
    ObjectMissingError,
    SettingsError,
    StorageFullError,
)
from ckptguard.formats.suffixes import name_of, suffixes_of
from ckptguard.layouts import tops
from ckptguard.records.run import Run
from ckptguard.recover.restorable import ReadablePlace, Restorable
from ckptguard.runs.candidates import Taken, first_of
from ckptguard.runs.free_space import need_room
from ckptguard.runs.removal import remove_folder_of_ours, remove_made_folders
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import Progress
from ckptguard.storage import Reader, Storage, open_storage
from ckptguard.storage.failures import FULL
from ckptguard.storage.local.writes import move_exclusively
from ckptguard.storage.read_ahead import CHUNK, IN_FLIGHT
from ckptguard.values.ids import CheckpointId, Step, name_of_run
from ckptguard.values.manifest import Manifest
from ckptguard.values.temporary_names import RESTORE
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from ckptguard.verification.collect_evidence import copy_differs

_log = logging.getLogger("ckptguard")
_BLOCK = 4 << 20  # from a local disk, where one reader is enough
_FILES_AT_ONCE = 3  # others are read while one is opened or synced


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """A restored checkpoint. `path` is absolute; `kept`: from the kept copy; `source`: the URL of the run or
    replica."""

    path: str
    id: CheckpointId
    bytes: int
    kept: bool
    outcome: Outcome
    source: str

    @property
    def series(self) -> str:
        """The series of the checkpoint."""
        return self.id.series

    @property
    def step(self) -> Step:
        """The step that its name states."""
        return self.id.step


class Restoring(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of `restore`: the checkpoint at `path` of `source` (URL of a run or replica) becomes `made`."""

    path: str
    source: str
    made: str
    files: int
    bytes: int


Tell = Callable[[Restoring], None]


def restore(
    view: RunView,
    dest: str,
    *,
    step: int | None = None,
    force: bool = False,
    work: Work = PLAIN,
    tell: Tell = lambda _: None,
) -> Restored:
    """Copy the known-good checkpoint, or that of `step`, to ``DEST/<original name>``, and read it back.

    If DEST is not a folder, and is named like a checkpoint file (``back.pt``), it is the file to make. Only a
    checkpoint of one file can become a file. `tell` is called before bytes are copied.

    A checkpoint without a verdict is verified first. The nearest whole copy is used: in place, kept, then replicas.
    Without `step`, an older good checkpoint replaces a damaged or unreadable one, with a warning. Damage in place is
    recorded. After any failure DEST is as it was.

    Raises:
        SettingsError: DEST is neither absent nor empty, is inside the run, or is no name for this checkpoint.
        RefusedError: the checkpoint is not GOOD, or its bytes are not the sealed ones; never with `force`.
        StorageFullError: there is too little free space. Nothing was written.
        NoKnownGoodError: nothing is good.
        NotFoundError: this step does not exist.
        CouldNotTellError: the remaining places could not be read.
    """
    if "://" in dest:
        raise SettingsError("DEST must be a local file or folder")
    goal = _goal(dest)
    root = view.run.storage.root
    if root is not None and Path(os.path.realpath(goal.path)).is_relative_to(os.path.realpath(root)):
        raise SettingsError(f"{goal.path} lies inside the run", hint="restore elsewhere, or use ckptguard rollback")
    _refuse_unless_free(goal)
    with contextlib.ExitStack() as held:
        offers = Restorable(view, step, force=force, work=work, held=held)
        restoring = _Attempts(goal, force, view.settings.on_full == "wait", work, tell)
        taken: Taken[ReadablePlace, Restored | CkptguardError] = first_of(
            offers, restoring.attempt, otherwise=offers.none_left
        )
    if isinstance(taken.result, CkptguardError):
        raise taken.result
    return taken.result


@dataclass(frozen=True)
class _Goal:
    """What DEST means: the file to make, or the folder to make the checkpoint in under its own name."""

    path: str
    is_file: bool

    @property
    def folder(self) -> str:
        """The folder that gets the checkpoint."""
        return os.path.dirname(self.path) if self.is_file else self.path

    def made(self, manifest: Manifest, run: Run) -> str:
        """The path of the restored checkpoint. Model files of a run's root get the run's name. SettingsError if a file
        was named that this checkpoint cannot be."""
        own = manifest.path.rpartition("/")[2]
        if not self.is_file:
            name = (name_of_run(run.url) or "final") if manifest.path == "." else own
            return os.path.join(self.path, name)
        if [f.path for f in manifest.files] != [manifest.path]:
            what = f"{own} is not one file"
        elif os.path.splitext(own)[1].lower() != os.path.splitext(self.path)[1].lower():
            what = f"{own} is a file of another kind"
        else:
            return self.path
        raise SettingsError(
            f"{self.path} is the name of a file, and {what}",
            hint=f"to name a folder, end it with a slash: {self.path}/",
        )


def _goal(dest: str) -> _Goal:
    path = os.path.abspath(os.path.expanduser(dest))
    named = name_of(path).endswith(suffixes_of("tensors", "arrays", "objects"))
    return _Goal(path, is_file=named and not dest.endswith("/") and not os.path.isdir(path))


@dataclass
class _Attempts:
    """Try one place after the other. `wait`: wait for free space in DEST."""

    goal: _Goal
    force: bool
    wait: bool
    work: Work
    tell: Tell
    _failed: tuple[str, str] | None = None  # what was tried last, and what was wrong with it

    def attempt(self, place: ReadablePlace) -> Restored | CkptguardError | str:
        """Return the restored checkpoint, or what is wrong with this place. A problem with DEST is an error, and ends
        it all."""
        if self._failed is not None and self._failed[0] != place.name:
            _log.warning("%s could not be restored: %s; trying %s", *self._failed, place.name)
        manifest, run = place.manifest, place.view.run
        made = self.goal.made(manifest, run)
        self.tell(
            Restoring(path=manifest.path, source=run.url, made=made, files=len(manifest.files), bytes=manifest.bytes)
        )
        try:
            need_room(open_storage(self.goal.folder, must_exist=False), manifest.bytes, manifest.path, wait=self.wait)
            done = self._restore_from(place, made)
        except CouldNotTellError as error:
            if isinstance(error, StorageFullError) or getattr(error, "key", "").startswith(self.goal.folder):
                return error
            self._note(place, error.message)
            raise
        if isinstance(done, str):
            self._note(place, done)
        return done

    def _restore_from(self, place: ReadablePlace, made: str) -> Restored | str:
        try:
            with _staging(self.goal.folder) as temporary:
                _copy(place, temporary, self.work.progress)
                wrong = copy_differs(open_storage(temporary), "", place.manifest, scanner=self.work.scanner)
                if wrong is not None and not self.force:
                    return wrong
                url, size, kept = place.view.run.url, place.manifest.bytes, place.where == KEPT
                _publish(temporary, made, place.manifest)
            return Restored(path=made, id=place.id, bytes=size, kept=kept, outcome=place.outcome, source=url)
        except (ObjectMissingError, ChangedWhileReadError) as error:
            return error.message

    def _note(self, place: ReadablePlace, wrong: str) -> None:
        """The files in place were not the sealed ones. Read them once more, and record the verdict."""
        self._failed = (place.name, wrong)
        if place.where == IN_PLACE:
            with contextlib.suppress(CouldNotTellError):
                checkpoint = place.view.look_again(place.manifest.path)
                if checkpoint is not None:
                    how, work = Verification(md5=False), Work(scanner=self.work.scanner)
                    verify_checkpoint(place.view, checkpoint, how, work=work)


def _refuse_unless_free(goal: _Goal) -> None:
    dest = goal.path
    if goal.is_file:
        if os.path.lexists(dest):
            raise SettingsError(f"{dest} exists already", hint="name a file that is not there yet, or a folder")
        return
    try:
        with os.scandir(dest) as entries:
            if any(entries):
                raise SettingsError(f"{dest} is not empty", hint="name an absent or empty folder")
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise SettingsError(f"{dest} is not a folder", hint="name an absent or empty folder") from error
    except PermissionError as error:
        raise DeniedError(f"{dest} cannot be read", key=dest) from error


@contextlib.contextmanager
def _staging(dest: str) -> Iterator[str]:
    """Make a temporary folder inside DEST, so that publishing is one rename. After a failure DEST is as before."""
    made: list[str] = []
    folder = dest
    while folder and not os.path.isdir(folder):
        made.append(folder)
        folder = os.path.dirname(folder)
    temporary = os.path.join(dest, RESTORE.new())
    try:
        os.makedirs(temporary)
    except OSError as error:
        raise DeniedError(f"{dest} cannot be made: {error.strerror}", key=dest) from error
    done = False
    try:
        yield temporary
        done = True
    finally:
        remove_folder_of_ours(temporary, RESTORE)
        if not done or not os.listdir(dest):
            remove_made_folders(made)


def _copy(place: ReadablePlace, temporary: str, progress: Progress | None) -> None:
    files = place.manifest.files
    wanted = [(place.prefix + file.path, os.path.join(temporary, *file.path.split("/"))) for file in files]
    fetch_files(place.storage, wanted, progress)


def _publish(temporary: str, final: str, manifest: Manifest) -> None:
    """Give the copied checkpoint its name, and its files beside it theirs."""
    dest = os.path.dirname(final)
    if os.path.lexists(final):
        raise SettingsError(f"{final} appeared meanwhile")
    handle = os.open(dest, os.O_RDONLY)
    try:
        if manifest.path == ".":
            os.makedirs(final)
            for name in os.listdir(temporary):
                os.rename(os.path.join(temporary, name), os.path.join(final, name))
        else:
            first, *beside = tops(manifest.path, [f.path for f in manifest.files])
            own = final if first == manifest.path else os.path.join(dest, first.rpartition("/")[2])
            goals = [(key, os.path.join(dest, key.rpartition("/")[2])) for key in beside]
            moves = [(os.path.join(temporary, *key.split("/")), goal) for key, goal in (*goals, (first, own))]
            _move_all(handle, moves)
        os.fsync(handle)
    finally:
        os.close(handle)


def _move_all(folder: int, moves: Sequence[tuple[str, str]]) -> None:
    """Move everything, or nothing. What appeared meanwhile under one of the names is not replaced."""
    moved: list[tuple[str, str]] = []
    try:
        for source, goal in moves:
            try:
                move_exclusively(folder, source, folder, goal, is_folder=os.path.isdir(source))
            except FileExistsError as error:
                raise SettingsError(f"{goal} appeared meanwhile") from error
            moved.append((source, goal))
    except BaseException:
        for source, goal in moved:
            with contextlib.suppress(OSError):
                os.rename(goal, source)
        raise


def fetch_files(storage: Storage, files: Sequence[tuple[str, str]], progress: Progress | None = None) -> None:
    """Copy objects to local paths that must not exist yet, and sync them. `files` are (key, path) pairs.

    If one fails, the others are given up, and parts of them stay behind. Remote files are read in parallel chunks, so
    memory use is bounded. Raises StorageFullError and DeniedError with the local path. Several threads call `progress`.
    """
    if storage.root is not None:
        chunks = _Chunks(progress)
        for key, target in files:
            _fetch(storage, key, target, chunks)
        return
    with (
        ThreadPoolExecutor(IN_FLIGHT, "ckptguard-fetch") as requests,
        ThreadPoolExecutor(_FILES_AT_ONCE, "ckptguard-fetch-file") as threads,
    ):
        chunks = _Chunks(progress, requests)
        try:
            fetching = [threads.submit(_fetch, storage, key, target, chunks) for key, target in files]
            wait(fetching, return_when=FIRST_EXCEPTION)
        finally:
            chunks.given_up.set()
            threads.shutdown(cancel_futures=True)
    for one in fetching:
        if not one.cancelled():
            one.result()


class _Chunks:
    """Copies the bytes of files piece by piece, in the threads of `requests` if there are any."""

    def __init__(self, progress: Progress | None, requests: Executor | None = None) -> None:
        self.given_up = threading.Event()
        self._progress, self._requests = progress, requests
        self._length = _BLOCK if requests is None else CHUNK

    def copy(self, reader: Reader, descriptor: int) -> None:
        begins = range(0, reader.entry.size, self._length)
        if self._requests is None:
            for begin in begins:
                self._piece(reader, descriptor, begin)
            return
        pieces = [self._requests.submit(self._piece, reader, descriptor, begin) for begin in begins]
        if wait(pieces, return_when=FIRST_EXCEPTION).not_done:
            self.given_up.set()
            wait(pieces)  # no thread may read or write after the files are closed
        for piece in pieces:
            piece.result()

    def _piece(self, reader: Reader, descriptor: int, begin: int) -> None:
        if self.given_up.is_set():
            return
        data = reader.read(begin, min(self._length, reader.entry.size - begin))
        left, position = memoryview(data), begin
        while left:
            written = os.pwrite(descriptor, left, position)
            left, position = left[written:], position + written
            if self._progress is not None:
                self._progress(written)
        # Make Linux write these bytes now, so that the final fsync is short. It writes pages that are no longer needed,
        # and keeps them in memory until then.
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # only a hint
                os.posix_fadvise(descriptor, begin, len(data), os.POSIX_FADV_DONTNEED)


def _fetch(storage: Storage, key: str, target: str, chunks: _Chunks) -> None:
    if chunks.given_up.is_set():
        return
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with storage.open(key) as reader, open(target, "xb", buffering=0) as out:
            chunks.copy(reader, out.fileno())
            if not chunks.given_up.is_set():
                os.fsync(out.fileno())
    except OSError as error:
        if error.errno in FULL:
            raise StorageFullError(f"no space left for {target}", key=target) from error
        raise DeniedError(f"{target} cannot be written: {error.strerror}", key=target) from error
