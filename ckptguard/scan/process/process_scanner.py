"""A scanner that works in separate processes: limited, without secrets, and replaceable when they die."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

import msgspec

from ckptguard.decisions.turns import LARGE
from ckptguard.errors import WorkerError
from ckptguard.scan import scan_files
from ckptguard.scan.options import Progress, ScanOptions
from ckptguard.scan.process.messages import Request
from ckptguard.scan.process.worker_process import WorkerLimits, WorkerProcess
from ckptguard.scan.result import Scan
from ckptguard.storage.protocol import Storage


class ProcessScanner:
    """A `Scanner` that reads local files in up to `processes` processes, each within `limits`.

    They share `workers` threads and the `rate` in bytes per second. A rate extends the time limit of a scan, and a
    change of it restarts the scan. Idle processes end after a while. If one dies, hangs or sends nonsense, the scan
    raises WorkerError, which is no verdict. Setting `stop` ends a scan at once. Remote storages are scanned in this
    process, because one without secrets could not open them.

    If `yields` says so, a long scan with `ScanOptions.patience` leaves the processors to everything else, and uses one
    thread. The end of the patience restarts it.

    Call it from a thread that lives as long as the scanner: the system ends the processes with the thread that started
    them.
    """

    def __init__(
        self,
        limits: WorkerLimits,
        *,
        processes: int = 1,
        workers: int = 2,
        stop: threading.Event | None = None,
        spare_cache: bool = False,
        rate: Callable[[], float | None] = lambda: None,
        yields: Callable[[], bool] = lambda: True,
    ) -> None:
        self._seconds = limits.seconds
        self._may_yield = yields if limits.niceness else lambda: False
        self._workers = workers
        self._stop = stop or threading.Event()
        self._spare_cache = spare_cache
        self._rate = rate
        self._processes = [WorkerProcess(limits) for _ in range(processes)]
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
                    return scan_files(storage, keys, limited, _until(is_over, progress))
                return self._scan(storage, keys, limited, progress, is_over, yields=yields)
            except WorkerError:
                if self._stop.is_set() or not is_outdated():
                    raise

    def _late_at(self, storage: Storage, keys: Sequence[str], options: ScanOptions) -> float:
        """Return until when a scan yields, in seconds of the monotonic clock. Few bytes are read at once."""
        if not self._may_yield() or options.patience is None or storage.root is None:
            return 0.0
        size, rate = sum(storage.stat(key).size for key in keys), self._rate()
        held_up = 0.0 if rate is None else size / rate
        return 0.0 if size <= LARGE else time.monotonic() + options.patience + held_up

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
        shares = _shares(storage, keys, len(self._processes))
        threads = 1 if yields else max(self._workers // len(shares), 1)
        rate, held_up = options.rate, 0.0
        if rate is not None:
            held_up, rate = sum(storage.stat(key).size for key in keys) / rate, rate / len(shares)
        options = msgspec.structs.replace(
            options, workers=threads, rate=rate, spare_cache=options.spare_cache or self._spare_cache
        )
        cpu_seconds = self._seconds * 2 * threads  # each has another thread for a whole-file digest
        root = storage.root or ""
        requests = [
            Request(url=root, keys=share, options=options, cpu_seconds=cpu_seconds, yields=yields) for share in shares
        ]
        with self._lock:
            scans = self._ask(requests, self._seconds + held_up, is_over)
        files = {file.entry.key: file for scan in scans for file in scan.files}
        if progress is not None:
            progress(sum(file.entry.size for file in files.values()))
        return Scan(files=tuple(files[key] for key in keys), seconds=time.perf_counter() - started)

    def _ask(self, requests: list[Request], seconds: float, is_over: Callable[[], bool]) -> list[Scan]:
        processes = self._processes[: len(requests)]
        for process in processes:  # here and not in the executor's threads, which soon end
            process.start(yields=requests[0].yields)
        if len(requests) == 1:
            return [processes[0].scan(requests[0], seconds, is_over)]
        failed = threading.Event()

        def stopped() -> bool:
            return is_over() or failed.is_set()

        with ThreadPoolExecutor(len(requests), "ckptguard-scan") as executor:
            futures: list[Future[Scan]] = [
                executor.submit(process.scan, request, seconds, stopped)
                for process, request in zip(processes, requests, strict=True)
            ]
            try:
                ended = wait(futures, return_when=FIRST_EXCEPTION).done
                first = next((error for error in (f.exception() for f in futures if f in ended) if error), None)
            finally:
                failed.set()  # the others need not continue
        if first is not None:
            raise first
        return [future.result() for future in futures]

    @property
    def pids(self) -> list[int]:
        """The ids of the existing scanning processes."""
        return [pid for pid in (process.pid for process in self._processes) if pid is not None]

    def close(self) -> None:
        """End the processes. After `stop` was set it does not wait for a scan."""
        with self._lock:
            for process in self._processes:
                process.end()

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


def _shares(storage: Storage, keys: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """Split the files for the processes, with about equal bytes, and no more processes than files."""
    if most == 1 or len(keys) < 2:
        return [tuple(keys)]
    sizes = {key: storage.stat(key).size for key in keys}
    shares: list[list[str]] = [[] for _ in range(min(most, len(sizes)))]
    loads = [0] * len(shares)
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        lightest = loads.index(min(loads))
        shares[lightest].append(key)
        loads[lightest] += sizes[key] + 1
    return [tuple(share) for share in shares]
