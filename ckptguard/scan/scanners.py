"""The scanner that the settings select."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from ckptguard.scan.options import Progress, Scanner, ScanOptions, workers_of
from ckptguard.scan.result import Scan
from ckptguard.storage.protocol import Storage
from ckptguard.values.settings import Settings


@contextmanager
def scanner_of(settings: Settings, *, rate: float | None = None) -> Iterator[Scanner]:
    """Yield a scanner in this thread, in threads, or in limited processes that end with the context. All find the
    same. `rate`: the most bytes a second."""
    if settings.executor == "processes":
        from ckptguard.scan.process.process_scanner import ProcessScanner
        from ckptguard.scan.process.worker_process import limits_of

        workers = workers_of(settings.workers)
        with ProcessScanner(limits_of(settings), processes=workers, workers=workers, rate=lambda: rate) as scanner:
            yield scanner
        return
    workers = 1 if settings.executor == "inline" else settings.workers

    def scan(
        storage: Storage, keys: Sequence[str], options: ScanOptions | None = None, progress: Progress | None = None
    ) -> Scan:
        from ckptguard.scan.files import scan_files

        options = msgspec.structs.replace(options or ScanOptions(), workers=workers, rate=rate)
        return scan_files(storage, keys, options, progress)

    yield scan
