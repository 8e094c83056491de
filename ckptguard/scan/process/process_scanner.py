"""A scanner that works in a separate process: limited, without secrets, and replaceable when it dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from ckptguard.decisions.turns import LARGE
from ckptguard.errors import WorkerError
from ckptguard.scan.options import Progress, ScanOptions
from ckptguard.scan.process.messages import Request
from ckptguard.scan.process.worker_process import WorkerLimits, WorkerProcess
from ckptguard.scan.result import Scan
from ckptguard.storage.protocol import Storage


class ProcessScanner:
    """A `Scanner` that reads local files in a process with `workers` threads, within `limits`.

    `rate` is in bytes per second. It extends the time limit of a scan, and a change of it restarts the scan. An idle
    process ends after a while. If it dies, hangs or sends nonsense, the scan raises WorkerError, which is no verdict.
    Setting `stop` ends a scan at once. Remote storages are scanned in this process, because one without secrets could
    not open them.

    If `yields` says so, a long scan with `ScanOptions.yield_for` leaves the processors to everything else, and uses one
    thread. The end of the patience restarts it.

    Call it from a thread that lives as long as the scanner: the system ends the process with the thread that started
    it.
    """

    def __init__(
        self,
        limits: WorkerLimits,
        *,
        workers: int = 2,
        stop: threading.Event | None = None,
        spare_cache: bool = False,
        rate: Callable[[], float | None] = lambda: None,
        yields: Callable[[], bool] = lambda: True,
    ) -> None:
        self._seconds = limits.seconds
        self._may_yield = yields
        self._workers = workers
        self._stop = stop or threading.Event()
        self._spare_cache = spare_cache
        self._rate = rate
        self._process = WorkerProcess(limits)
        self._lock = threading.Lock()

    def __call__(
        self,
        storage: Storage,
        keys: Sequence[str],
        options: ScanOptions | None = None,
        progress: Progress | None = None,
    ) -> Scan:
        options = options or ScanOptions()
        late_at = self._late_at(storage, keys, options)
        while True:
            rate = self._rate()
            yields = time.monotonic() < late_at
            limited = msgspec.structs.replace(options, rate=None if options.structure_only else rate)

            def is_outdated(rate: float | None = rate, yields: bool = yields) -> bool:
                return self._rate() != rate or (yields and time.monotonic() >= late_at)

            def is_over(is_outdated: Callable[[], bool] = is_outdated) -> bool:
                return self._stop.is_set() or is_outdated()

            try:
                if storage.root is None:
                    from ckptguard.scan.files import scan_files  # with all that it needs

                    return scan_files(storage, keys, limited, _until(is_over, progress))
                return self._scan(storage, keys, limited, progress, is_over, yields=yields)
            except WorkerError:
                if self._stop.is_set() or not is_outdated():
                    raise

    def _late_at(self, storage: Storage, keys: Sequence[str], options: ScanOptions) -> float:
        """Return until when a scan yields, in seconds of the monotonic clock. Few bytes are read at once."""
        if not self._may_yield() or options.yield_for is None or storage.root is None:
            return 0.0
        size, rate = sum(storage.stat(key).size for key in keys), self._rate()
        held_up = 0.0 if rate is None else size / rate
        return 0.0 if size <= LARGE else time.monotonic() + options.yield_for + held_up

    def _scan(
        self,
        storage: Storage,
        keys: Sequence[str],
        options: ScanOptions,
        progress: Progress | None,
        is_over: Callable[[], bool],
        *,
        yields: bool,
    ) -> Scan:
        started = time.perf_counter()
        threads, held_up = 1 if yields else self._workers, 0.0
        if options.rate is not None:
            held_up = sum(storage.stat(key).size for key in keys) / options.rate
        options = msgspec.structs.replace(
            options, workers=threads, spare_cache=options.spare_cache or self._spare_cache
        )
        request = Request(
            url=storage.root or "",
            keys=tuple(keys),
            options=options,
            cpu_seconds=self._seconds * 2 * threads,  # each has another thread for a whole-file digest
            yields=yields,
        )
        with self._lock:
            self._process.start(yields=yields)
            scan = self._process.scan(request, self._seconds + held_up, is_over)
        files = {file.entry.key: file for file in scan.files}
        if progress is not None:
            progress(sum(file.entry.size for file in scan.files))
        return Scan(files=tuple(files[key] for key in keys), seconds=time.perf_counter() - started)

    @property
    def pids(self) -> list[int]:
        """The id of the scanning process, if there is one."""
        pid = self._process.pid
        return [] if pid is None else [pid]

    def close(self) -> None:
        """End the process. After `stop` was set it does not wait for a scan."""
        with self._lock:
            self._process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _until(is_over: Callable[[], bool], progress: Progress | None) -> Progress:
    """Return a progress callback that ends a scan in this process when it is over."""

    def report(done: int) -> None:
        if is_over():
            raise WorkerError("the scan was stopped")
        if progress is not None:
            progress(done)

    return report
