"""The scanner that the settings select."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from ckptguard.scan.options import Progress, Scanner, ScanOptions
from ckptguard.scan.result import Scan
from ckptguard.storage.protocol import Storage
from ckptguard.values.settings import Settings


@contextmanager
def scanner_of(settings: Settings, *, rate: float | None = None) -> Iterator[Scanner]:
    """Yield a scanner that scans in threads. `rate`: the most bytes a second."""

    def scan(
        storage: Storage, keys: Sequence[str], options: ScanOptions | None = None, progress: Progress | None = None
    ) -> Scan:
        from ckptguard.scan.files import scan_files

        options = msgspec.structs.replace(options or ScanOptions(), workers=settings.workers, rate=rate)
        return scan_files(storage, keys, options, progress)

    yield scan
