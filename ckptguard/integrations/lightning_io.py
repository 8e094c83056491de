"""The CheckpointIO that seals what Lightning saves while it is written, and keeps the last good one."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import msgspec
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from ckptguard.errors import CkptguardError, NoKnownGoodError
from ckptguard.records.run import Run, open_run
from ckptguard.recover.verify_pending import verify_pending
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settings_file import GivenSettings, given_settings, training_settings
from ckptguard.scan import ScanOptions, scan_files
from ckptguard.scan.result import Scan
from ckptguard.storage.memory_reader import MemoryReader
from ckptguard.storage.protocol import UNNAMED, Entry, Storage
from ckptguard.upkeep.finish_copies import finish_copies
from ckptguard.values.ids import escape
from ckptguard.values.manifest import Manifest
from ckptguard.values.own_log import log as _log
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint
from ckptguard.verification.collect_evidence import collect_evidence, manifest_files
from ckptguard.verification.seal import seal_written

_BLOCK = 64 * 1024**2  # bytes per write, so that the disk begins before all is handed over
Value = TypeVar("Value")


class GuardedIO(TorchCheckpointIO):
    """Writes Lightning's own files. Each file below `run` is hashed and sealed while it is saved.

    A thread then reads it back and judges it while training goes on. It ends before the next save, and before the end
    of training. What ``ModelCheckpoint`` wants deleted is deleted after that. The last good one stays until there is
    another. It needs no daemon. A failure of ckptguard is a warning; a save that fails raises.
    """

    def __init__(self, run: str | os.PathLike[str], *, settings: GivenSettings = None) -> None:
        self.settings = given_settings(settings, lambda: training_settings(run))
        self.url = os.path.realpath(os.fspath(run))  # as ModelCheckpoint takes its folder
        self.series: str | None = None  # of the last save that has a step
        self._unwanted: set[str] = set()
        self._worker: ThreadPoolExecutor | None = None  # only while it is needed: Lightning may pickle this
        self._last: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save and seal; a verdict comes beside training."""
        self.wait()
        place = _place(path)
        run = self._run_of(place)
        if run is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        self._unwanted.discard(place)
        inside = os.path.relpath(place, self.url)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        data = buffer.getbuffer()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="ckptguard-hash") as hashing:
            scanning = _submit(hashing, lambda: _scan(inside, data))
            _write(run, inside, data)
        try:
            sealed = _seal(RunView(run, self.settings), inside, scanning.result())
            self.series = sealed.series if sealed is not None else self.series
        except Exception as error:  # it was written, and that is all that training needs
            _log.warning("%s was saved, and could not be sealed: %s", path, error)
        self._beside(lambda: self._judge(inside))

    def remove_checkpoint(self, path: Any) -> None:
        """Delete it once the saves up to now are judged, unless it is the known-good then."""
        place = _place(path)
        if not self.holds(place):
            super().remove_checkpoint(path)
            return
        self._unwanted.add(place)
        self._beside(self._delete_unwanted)

    def teardown(self) -> None:
        """Training ends: with a copy of the known-good checkpoint that nothing can delete or overwrite."""
        if self._last is not None:
            self.keep()
        self.wait()
        if self._worker is not None:
            self._worker.shutdown()
        self._worker = self._last = None

    def keep(self) -> None:
        """Beside training, make an independent copy of the known-good checkpoint if there is none."""
        self._beside(self._keep)

    def wait(self) -> None:
        """Return when what was saved is judged, and what is to be deleted is deleted."""
        if self._last is not None:
            wait([self._last])

    def _beside(self, work: Callable[[], None]) -> None:
        def warned() -> None:
            try:
                work()
            except Exception as error:  # beside training, nothing of ours may surface in it
                _log.warning("the saves in %s could not be looked after: %s", self.url, error)

        self._worker = self._worker or ThreadPoolExecutor(max_workers=1, thread_name_prefix="ckptguard")
        self._last = _submit(self._worker, warned)
        if self._last.done() and (error := self._last.exception()) is not None:
            _log.warning("the saves in %s could not be looked after: %s", self.url, error)

    def _judge(self, inside: str) -> None:
        view = self._view()
        checkpoint = view.checkpoint(inside)
        if checkpoint is not None:
            checked = verify_checkpoint(view, checkpoint)
            if checked.outcome is not Outcome.GOOD:
                _log.error("%s is %s", view.run.usable(inside), checked.outcome.value)
        self._delete_unwanted()

    def _keep(self) -> None:
        for trouble in finish_copies(self._view()):
            _log.warning("%s", trouble)

    def _delete_unwanted(self) -> None:
        if not self._unwanted:
            return
        view = self._view()
        verify_pending(view)  # a sharding strategy saves without asking us
        try:
            known = find_known_good(view.run).path
        except NoKnownGoodError:
            known = None
        for place in sorted(self._unwanted - {known}):
            super().remove_checkpoint(place)
            self._unwanted.discard(place)

    def find_series(self) -> str | None:
        """The series of the last save, else of the known-good, else of the save with the highest step, if any."""
        self.wait()
        view = self._view()
        if self.series is not None or not os.path.isdir(self.url):
            return self.series
        with contextlib.suppress(NoKnownGoodError):
            return find_known_good(view.run).series
        present = [(c.step, c.series) for c in view.checkpoints if c.step is not None]
        return max(present)[1] if present else None

    def open_run(self) -> Run:
        """The run as it is now."""
        return open_run(self.url, self.settings, must_exist=False)

    def _view(self) -> RunView:
        return RunView(self.open_run(), self.settings)

    def holds(self, place: str) -> bool:
        """True if this lies in the run."""
        return os.path.commonpath([place, self.url]) == self.url

    def _run_of(self, place: str) -> Run | None:
        """The run, if this lies in it and it can be opened."""
        if not self.holds(place):
            _log.warning(
                "%s is not in the run %s: it is not guarded; to guard it: ModelCheckpoint(dirpath=%r)",
                place,
                self.url,
                self.url,
            )
            return None
        try:
            os.path.relpath(place, self.url).encode()
            os.makedirs(self.url, exist_ok=True)
            return self.open_run()
        except (CkptguardError, UnicodeEncodeError) as error:
            reason = UNNAMED if isinstance(error, UnicodeEncodeError) else error
            _log.warning("%s is not guarded: %s", escape(place), reason)
            return None


def _place(path: Any) -> str:
    """Where a file really lies; a link under its own name is not followed."""
    whole: str = os.path.abspath(os.fspath(path))
    folder, name = os.path.split(whole)
    return os.path.join(os.path.realpath(folder), name)


def _submit(threads: ThreadPoolExecutor, work: Callable[[], Value]) -> Future[Value]:
    """Return the future of some work; failed, if no thread can do it any more, as at the end of the process."""
    try:
        return threads.submit(work)
    except RuntimeError as error:
        failed: Future[Value] = Future()
        failed.set_exception(error)
        return failed


def _scan(path: str, data: memoryview) -> Scan:
    return scan_files(cast(Storage, _OneFile(path, data)), [path], ScanOptions(md5=False))


def _write(run: Run, path: str, data: memoryview) -> None:
    """Write a file of the run, durably and in one step for every reader. Raises StorageError."""
    with run.storage.upload(path, replace=True) as upload:
        for start in range(0, len(data), _BLOCK):
            upload.write(data[start : start + _BLOCK])
        upload.commit()


def _seal(view: RunView, path: str, scan: Scan) -> Manifest | None:
    """Seal a file as it was in memory. It still has no verdict. None for one that names no step: it is not sealed."""
    checkpoint = view.look_again(path)
    if checkpoint is None or checkpoint.step is None:
        return None
    storage = view.run.storage
    entry = storage.stat(path)
    scan = msgspec.structs.replace(scan, files=tuple(msgspec.structs.replace(f, entry=entry) for f in scan.files))
    files = manifest_files(collect_evidence(storage, checkpoint, scan))
    return seal_written(view.run, path=path, layout=checkpoint.layout, step=checkpoint.step, files=files)


class _OneFile:
    """As much of a storage as a scan of one file needs."""

    root = None

    def __init__(self, key: str, data: memoryview) -> None:
        self._reader = MemoryReader(Entry(key=key, kind="file", size=len(data)), data)

    def open(self, key: str) -> MemoryReader:
        return self._reader
