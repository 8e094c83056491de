"""Where a save of our own layout is written: a local folder that is renamed when whole, or a remote storage.

Remote objects are streamed under their final names by the holder of the path's claim, without local copies or renames.
All are sent first and made visible together. Nothing counts before the manifest exists.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptguard.errors import BusyError, CkptguardError, ObjectMissingError, SettingsError, StorageError
from ckptguard.keep.quarantine import mark_suspect, quarantine
from ckptguard.layouts.own import LAYOUT, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, folder_name
from ckptguard.records.leases import RENEWED, Claim, claim_path, read_claim, release, renew
from ckptguard.records.run import Run
from ckptguard.runs.free_space import file_system_of, free_space, need_room
from ckptguard.runs.history import history_of_series
from ckptguard.runs.removal import remove_folder_of_ours, remove_half_save, remove_unsealed
from ckptguard.runs.run_view import RunView
from ckptguard.storage.failures import translated
from ckptguard.storage.local.writes import shown_as_written
from ckptguard.storage.protocol import Upload
from ckptguard.training.content.safetensors_file import FileStream, OutputStream
from ckptguard.upkeep.leftovers import collect_claim
from ckptguard.upkeep.room import RoomNotes, leave_room
from ckptguard.values.ids import series_of
from ckptguard.values.manifest import File, Manifest
from ckptguard.values.own_log import log as _log
from ckptguard.values.temporary_names import ASIDE, SAVE
from ckptguard.verification.seal import as_stored, seal_written

_FILES = (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE)
_turns: dict[str, SaveTurn] = {}  # of the claims that this process holds, by token


class SaveAbandoned(Exception):
    """Raised inside a save that was given up."""


class SaveTurn:
    """Decides between finishing a save and abandoning it: only one of them happens.

    `abandoned`: nobody waits for the save any longer. `waits_for_room`: it has not begun to write, because the storage
    is full.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False
        self.abandoned = False
        self.waits_for_room = False

    def check_stop(self) -> None:
        """Raise SaveAbandoned if nobody waits for this save any longer."""
        if self.abandoned:
            raise SaveAbandoned

    def tell_whether_it_waits(self, waits: bool) -> None:
        """Note that the save begins or ends to wait for free space."""
        self.waits_for_room = waits

    def abandon(self) -> bool:
        """Abandon the save. False if it is already sealed and counts."""
        with self._lock:
            self.abandoned = not self._over
            return self.abandoned

    def end(self) -> bool:
        """Mark the save as sealed. False if it was abandoned before, and must not be trusted."""
        with self._lock:
            self._over = not self.abandoned
            return self._over


class Destination:
    """One checkpoint while it is written; its writer enters it. Without a commit nothing remains under its final name,
    and no temporary folder either."""

    def __init__(self, view: RunView, step: int, turn: SaveTurn) -> None:
        self._view, self._step, self._turn = view, step, turn
        self._name = folder_name(step)

    def check_stop(self) -> None:
        """Raise SaveAbandoned once nobody waits for this save any longer. Call it often."""
        self._turn.check_stop()

    def file(self, name: str) -> contextlib.AbstractContextManager[OutputStream]:
        """Open a new file of the checkpoint. After an exit without error all its bytes are durable."""
        raise NotImplementedError

    def commit(self, files: Sequence[File], metrics: Mapping[str, float] | None, *, full: bool = True) -> Manifest:
        """Publish the checkpoint under its name and seal it. An existing one there is moved aside first. Unless it is
        `full`, its manifest says that its optimizer was left out.

        SaveAbandoned if nobody waits for it any longer. Call `settle` afterwards.
        """
        raise NotImplementedError

    def _seal(self, files: Sequence[File], metrics: Mapping[str, float] | None, full: bool) -> Manifest:
        run = self._view.run
        stored = tuple(as_stored(run, file) for file in sorted(files, key=lambda f: f.path))
        self._turn.check_stop()
        left_out = () if full else (f"{self._name}/{OPTIMIZER_FILE}",)
        return seal_written(
            run,
            path=self._name,
            layout=LAYOUT.name,
            step=self._step,
            files=stored,
            metrics=metrics,
            left_out=left_out,
        )


@contextlib.contextmanager
def destination(view: RunView, step: int, turn: SaveTurn) -> Iterator[Destination]:
    """Open the destination for the checkpoint of a step. Raises BusyError if another writer is using it.

    If a remote save is killed, it leaves its claim of the path. The next pass over the run uses it to find what else is
    left.
    """
    if view.run.storage.root is not None:
        with contextlib.closing(LocalFolder(view, step, turn)) as place:
            place.open()
            yield place
        return
    claim = _claim(view.run, folder_name(step), step)
    _turns[claim.token] = turn
    try:
        turn.check_stop()
        make_room(view, folder_name(step))
        try:
            with contextlib.ExitStack() as uploads:  # discards what was not committed
                yield RemoteObjects(view, step, turn, claim, uploads)
        except Exception:
            # Without its manifest it would never be good: leave nothing that looks like a checkpoint.
            _remove_own(view.run, claim)
            raise
    finally:
        del _turns[claim.token]
        with contextlib.suppress(StorageError):  # otherwise it is collected once this process has ended
            release(view.run, claim)


class LocalFolder(Destination):
    """A temporary folder beside its final name. Several ranks may write into one `temporary` folder.

    Only the rank with `leads` commits it, and removes what is left of it.
    """

    def __init__(
        self, view: RunView, step: int, turn: SaveTurn, *, temporary: str | None = None, leads: bool = True
    ) -> None:
        super().__init__(view, step, turn)
        self._root, self._leads = local_root(view.run), leads
        self._temporary = temporary or temporary_name(step)
        self.folder = os.path.join(self._root, self._temporary)
        self._shown = contextlib.ExitStack()

    def open(self) -> None:
        """Make the folder, and mark it as being written."""
        with translated(self._temporary, self._root):
            os.makedirs(self.folder, exist_ok=True)
        self._shown.enter_context(shown_as_written(self.folder))

    def close(self) -> None:
        """Remove what was not committed, whether or not it was opened."""
        self._shown.close()
        if self._leads:
            remove_folder_of_ours(self.folder, SAVE)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[OutputStream]:
        """Open a file. Raises StorageFullError and the other storage errors."""
        key = f"{self._name}/{name}"
        with translated(key, self.folder):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(os.path.join(self.folder, name), flags, 0o666)
        try:
            with contextlib.closing(FileStream(descriptor, key=key, where=self.folder)) as stream:
                yield stream
                stream.finish()
        finally:
            os.close(descriptor)

    def commit(self, files: Sequence[File], metrics: Mapping[str, float] | None, *, full: bool = True) -> Manifest:
        run, name = self._view.run, self._name
        sync_folder(self.folder)
        own = os.stat(self.folder).st_ino
        self.check_stop()
        make_room(self._view, name)
        self.check_stop()
        run.storage.move(self._temporary, name)
        try:
            return self._seal(files, metrics, full)
        except Exception:
            # Without its manifest it would never be good: leave nothing that looks like a checkpoint. But if this save
            # was abandoned, a later one may be there now.
            with contextlib.suppress(OSError):
                remove_half_save(run, name, inode=own)
            raise


class RemoteObjects(Destination):
    """Objects under their final names, written by the holder of the path's claim."""

    def __init__(self, view: RunView, step: int, turn: SaveTurn, claim: Claim, uploads: contextlib.ExitStack) -> None:
        super().__init__(view, step, turn)
        self._claim, self._open = claim, uploads
        self._sign_due = time.monotonic() + RENEWED
        self._uploads: dict[str, Upload] = {}

    def check_stop(self) -> None:
        """Also renew the claim from time to time."""
        super().check_stop()
        now = time.monotonic()
        if now >= self._sign_due:
            self._sign_due = now + RENEWED
            try:
                renew(self._view.run, self._claim)
            except StorageError as error:
                _log.debug("the claim could not be renewed: %s", error)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[OutputStream]:
        """Send everything; it appears with the commit."""
        upload = self._open.enter_context(self._view.run.storage.upload(f"{self._name}/{name}"))
        self._uploads[name] = upload
        yield upload

    def commit(self, files: Sequence[File], metrics: Mapping[str, float] | None, *, full: bool = True) -> Manifest:
        for name in _FILES:
            if name in self._uploads:
                self.check_stop()
                self._uploads[name].commit()
        self._open.close()
        return self._seal(files, metrics, full)


def temporary_name(step: int) -> str:
    """Return a new name for a folder in which the checkpoint of a step is written."""
    return SAVE.new(folder_name(step).removeprefix("step-") + "-")


def local_root(run: Run) -> str:
    """Return the run's local folder. Raises SettingsError for a run on another storage."""
    if run.storage.root is None:
        raise SettingsError(
            f"several ranks save their own shards into a local folder, but {run.url} is not local",
            hint="name a folder that all ranks share, or pass your own save= and load=",
        )
    return run.storage.root


def room_for(view: RunView, size: int, what: str, **waiting: Any) -> None:
    """Release kept copies and empty the trash if fewer than `size` bytes are free. Then do as `need_room` does.

    The bytes of one good save stay. StorageFullError if the room is still too small, and it may not wait.
    """
    storage = view.run.storage
    free = free_space(storage)
    if free is not None and free < size and file_system_of(storage) == file_system_of(view.run.records):
        leave_room(view, RoomNotes(), size)
    need_room(storage, size, what, **waiting)


def make_room(view: RunView, path: str) -> None:
    """Move aside what is at a path that is about to be written: an older generation of the same step."""
    storage = view.run.storage
    try:
        storage.stat(path)
    except ObjectMissingError:
        return
    if view.look_again(path) is not None:
        quarantine(view, path, reason="the step is saved again", suspect=False)
    else:
        # An empty folder, or a file instead of a folder: not a checkpoint, but not ours, so it is never removed.
        storage.move(path, ASIDE.new())


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    with translated("", folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def settle(view: RunView, manifest: Manifest, turn: SaveTurn) -> None:
    """Settle a sealed save. If it was abandoned before, training went back before it, and it must never be used.

    Then it is quarantined as SUSPECT, and SaveAbandoned is raised.
    """
    if turn.end():
        return
    reason = "the save was abandoned before it was sealed"
    view.refresh()
    if view.history.current(manifest.series, manifest.step, manifest.path) == manifest.id:
        with contextlib.suppress(ObjectMissingError):
            quarantine(view, manifest.path, reason=reason)
            raise SaveAbandoned
    mark_suspect(view, manifest.id, reason)
    raise SaveAbandoned


def _claim(run: Run, name: str, step: int) -> Claim:
    def claim() -> Claim:
        id = history_of_series(run, series_of(name)).next_id(series_of(name), step)
        return claim_path(run, path=name, series=id.series, step=step, generation=id.generation)

    try:
        return claim()
    except BusyError:
        other = read_claim(run, name)
        given_up = other is not None and other.token in _turns and _turns[other.token].abandoned
        if other is not None and not collect_claim(run, other, dead=given_up):
            raise
    return claim()


def _remove_own(run: Run, claim: Claim) -> None:
    """Remove what this save wrote, unless it was given up for another save that writes there now."""
    try:
        remove_unsealed(run, claim, _FILES)
    except CkptguardError as error:
        _log.warning("the rest of %s could not be removed: %s", claim.path, error)
