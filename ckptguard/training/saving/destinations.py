"""Where a save of our own layout is written: a local folder that gets its name when whole, or a storage elsewhere.

Elsewhere the objects are streamed under their final names, with no copy here and no rename there, by whoever holds
the claim of the path. All of them are sent first and made visible together. Either way nothing counts before the
manifest is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence

from ckptguard.errors import BusyError, CkptguardError, ObjectMissingError, SettingsError, StorageError
from ckptguard.keep.quarantine import mark_suspect, quarantine
from ckptguard.layouts.own import LAYOUT, MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, folder_name
from ckptguard.records.leases import RENEWED, Claim, claim_path, holds, read_claim, release, renew
from ckptguard.records.run import Run
from ckptguard.runs.history import history_of_series
from ckptguard.runs.run_view import RunView
from ckptguard.storage.failures import translated
from ckptguard.storage.local.writes import shown_as_written
from ckptguard.storage.protocol import Upload
from ckptguard.training.content.safetensors_file import FileStream, Stream
from ckptguard.upkeep.leftovers import collect_claim
from ckptguard.values.ids import series_of
from ckptguard.values.manifest import File, Manifest
from ckptguard.verification.seal import as_stored, seal_written

_FILES = (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE)
_log = logging.getLogger("ckptguard")
_gates: dict[str, Gate] = {}  # of the claims that this process holds, by token


class SaveAbandoned(Exception):
    """Raised inside of a save that was given up."""


class Gate:
    """Between a save and whoever may abandon it: both cannot have their way. `abandoned`: nobody waits for the save any
    more; `waits_for_room`: it has not begun to write, because the storage is full."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False
        self.abandoned = False
        self.waits_for_room = False

    def check_stop(self) -> None:
        """SaveAbandoned, if nobody waits for this save any more."""
        if self.abandoned:
            raise SaveAbandoned

    def tell_whether_it_waits(self, waits: bool) -> None:
        """The save begins to wait for room, or has it."""
        self.waits_for_room = waits

    def abandon(self) -> bool:
        """Nobody waits for the save any more; False if it is sealed already and counts."""
        with self._lock:
            self.abandoned = not self._over
            return self.abandoned

    def end(self) -> bool:
        """The save is sealed; False if it had been abandoned before that, and must not be trusted."""
        with self._lock:
            self._over = not self.abandoned
            return self._over


class Destination:
    """One checkpoint while it is written, entered by the one who writes it. Left without a commit, however that
    happens, nothing is left of it under its final name, and no temporary folder either."""

    def __init__(self, view: RunView, step: int, gate: Gate) -> None:
        self._view, self._step, self._gate = view, step, gate
        self._name = folder_name(step)

    def check_stop(self) -> None:
        """To be called often: SaveAbandoned, once nobody waits for this save any more."""
        self._gate.check_stop()

    def file(self, name: str) -> contextlib.AbstractContextManager[Stream]:
        """A new file of the checkpoint. Left without an error, all its bytes are there to stay."""
        raise NotImplementedError

    def commit(self, files: Sequence[File], metrics: Mapping[str, float] | None) -> Manifest:
        """Have the checkpoint appear under its name, and seal it with its files, and with its metrics. What lies there
        already is moved aside first. SaveAbandoned if nobody waits for it any more; `settle` must come after it."""
        raise NotImplementedError

    def _seal(self, files: Sequence[File], metrics: Mapping[str, float] | None) -> Manifest:
        run = self._view.run
        stored = tuple(as_stored(run, file) for file in sorted(files, key=lambda f: f.path))
        self._gate.check_stop()
        return seal_written(run, path=self._name, layout=LAYOUT.name, step=self._step, files=stored, metrics=metrics)


@contextlib.contextmanager
def destination(view: RunView, step: int, gate: Gate) -> Iterator[Destination]:
    """Where the checkpoint of a step goes. BusyError if another writer is at it; killed, a save that goes elsewhere
    leaves its claim of the path, by which the next look at the run finds what else it left."""
    if view.run.storage.root is not None:
        with contextlib.closing(LocalFolder(view, step, gate)) as place:
            place.open()
            yield place
        return
    claim = _claim(view.run, folder_name(step), step)
    _gates[claim.token] = gate
    try:
        gate.check_stop()
        make_room(view, folder_name(step))
        try:
            with contextlib.ExitStack() as uploads:  # what was not committed is discarded
                yield RemoteObjects(view, step, gate, claim, uploads)
        except Exception:
            # Without its manifest it would never be good: leave nothing that looks like a checkpoint.
            _remove_own(view.run, claim)
            raise
    finally:
        del _gates[claim.token]
        with contextlib.suppress(StorageError):  # else it is collected once this process has ended
            release(view.run, claim)


class LocalFolder(Destination):
    """A temporary folder beside its final name. Several ranks may write into one `temporary` folder; only the one that
    `leads` commits it, and removes what is left of it."""

    def __init__(
        self, view: RunView, step: int, gate: Gate, *, temporary: str | None = None, leads: bool = True
    ) -> None:
        super().__init__(view, step, gate)
        self._root, self._leads = local_root(view.run), leads
        self._temporary = temporary or temporary_name(step)
        self.folder = os.path.join(self._root, self._temporary)
        self._shown = contextlib.ExitStack()

    def open(self) -> None:
        """Make the folder, and let others know that it is being written."""
        with translated(self._temporary, self._root):
            os.makedirs(self.folder, exist_ok=True)
        self._shown.enter_context(shown_as_written(self.folder))

    def close(self) -> None:
        """Remove what was not committed, whether or not it was opened."""
        self._shown.close()
        if self._leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Stream]:
        """StorageFullError and its kinds when the disk refuses."""
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

    def commit(self, files: Sequence[File], metrics: Mapping[str, float] | None) -> Manifest:
        run, name = self._view.run, self._name
        sync_folder(self.folder)
        own = os.stat(self.folder).st_ino
        self.check_stop()
        make_room(self._view, name)
        self.check_stop()
        run.storage.move(self._temporary, name)
        try:
            return self._seal(files, metrics)
        except Exception:
            # Without its manifest it would never be good: leave nothing that looks like a checkpoint. But if this save
            # was abandoned, a later one may lie there by now.
            with contextlib.suppress(OSError):
                if os.stat(os.path.join(self._root, name)).st_ino == own:
                    run.storage.remove(name)
            raise


class RemoteObjects(Destination):
    """Objects under their final names, written by whoever holds the claim of the path."""

    def __init__(self, view: RunView, step: int, gate: Gate, claim: Claim, uploads: contextlib.ExitStack) -> None:
        super().__init__(view, step, gate)
        self._claim, self._open = claim, uploads
        self._sign_due = time.monotonic() + RENEWED
        self._uploads: dict[str, Upload] = {}

    def check_stop(self) -> None:
        """Now and then it tells others that the writer lives."""
        super().check_stop()
        now = time.monotonic()
        if now >= self._sign_due:
            self._sign_due = now + RENEWED
            try:
                renew(self._view.run, self._claim)
            except StorageError as error:
                _log.debug("no sign of life could be given: %s", error)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Stream]:
        """Everything is sent, and appears with the commit."""
        upload = self._open.enter_context(self._view.run.storage.upload(f"{self._name}/{name}"))
        self._uploads[name] = upload
        yield upload

    def commit(self, files: Sequence[File], metrics: Mapping[str, float] | None) -> Manifest:
        for name in _FILES:
            if name in self._uploads:
                self.check_stop()
                self._uploads[name].commit()
        self._open.close()
        return self._seal(files, metrics)


def temporary_name(step: int) -> str:
    """A new name for a folder in which the checkpoint of a step is written."""
    return f"tmp-{folder_name(step)}-{uuid.uuid4().hex[:8]}"


def local_root(run: Run) -> str:
    """The run's local folder; SettingsError for a run on another storage."""
    if run.storage.root is None:
        raise SettingsError(
            f"several ranks save their own shards into a local folder, and {run.url} is none",
            hint="name a folder that all ranks share, or pass your own save= and load=",
        )
    return run.storage.root


def make_room(view: RunView, path: str) -> None:
    """Move aside whatever lies under a name that is about to be written: an older generation of the same step."""
    storage = view.run.storage
    try:
        storage.stat(path)
    except ObjectMissingError:
        return
    if view.look_again(path) is not None:
        quarantine(view, path, reason="the step is saved again", suspect=False)
    else:
        # An empty folder, or a file where a folder belongs: no checkpoint, but somebody's: it is never removed.
        storage.move(path, f"tmp-aside-{uuid.uuid4().hex[:8]}")


def sync_folder(folder: str) -> None:
    """Have the names in a folder on the disk."""
    with translated("", folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def settle(view: RunView, manifest: Manifest, gate: Gate) -> None:
    """A save is sealed. If it had been abandoned before, training went back before it: it must never be chosen. Then it
    is quarantined as SUSPECT, and SaveAbandoned is raised."""
    if gate.end():
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
        given_up = other is not None and other.token in _gates and _gates[other.token].abandoned
        if other is not None and not collect_claim(run, other, dead=given_up):
            raise
    return claim()


def _remove_own(run: Run, claim: Claim) -> None:
    """Remove what this save wrote, unless it was given up for another one that writes there by now."""
    try:
        if holds(run, claim):
            for file in _FILES:
                run.storage.remove(f"{claim.path}/{file}")
    except CkptguardError as error:
        _log.warning("what is left of %s could not be removed: %s", claim.path, error)
