"""The one pass over the bytes: digests and numbers. Importing it is cheap; the first scan loads what it needs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ckptguard.scan.options import Progress, Scanner, ScanOptions
from ckptguard.scan.result import Numbers, Scan, ScannedFile
from ckptguard.storage.protocol import Storage
from ckptguard.values.settings import Settings

__all__ = [
    "Numbers",
    "Progress",
    "Scan",
    "ScanOptions",
    "ScannedFile",
    "Scanner",
    "digest_places",
    "scan_files",
    "scanner_of",
]


def scanner_of(settings: Settings, *, rate: float | None = None) -> Scanner:
    """Return the scanner that the settings select. `rate`: the most bytes a second.

    It scans in this process, but for local files that h5py parses: those in a scanning process within its limits.
    """

    def scan(
        storage: Storage, keys: Sequence[str], options: ScanOptions | None = None, progress: Progress | None = None
    ) -> Scan:
        options = msgspec.structs.replace(options or ScanOptions(), workers=settings.workers, rate=rate)
        if storage.root is None or not any(_is_read_by_h5py(storage, key) for key in keys):
            return scan_files(storage, keys, options, progress)
        from ckptguard.scan.process.process_scanner import ProcessScanner
        from ckptguard.scan.process.worker_process import limits_of

        limits, workers = limits_of(settings), options.workers or 1
        with ProcessScanner(limits, workers=workers, rate=lambda: rate, yields=lambda: False) as scanner:
            return scanner(storage, keys, options, progress)

    return scan


def _is_read_by_h5py(storage: Storage, key: str) -> bool:
    if key.endswith(".safetensors"):
        return False
    from ckptguard.formats.table import FIRST_BYTES, is_read_by_h5py

    with storage.open(key) as reader:
        return is_read_by_h5py(key, reader.read(0, min(reader.entry.size, FIRST_BYTES)))


def scan_files(
    storage: Storage, keys: Sequence[str], options: ScanOptions | None = None, progress: Progress | None = None
) -> Scan:
    """See `ckptguard.scan.files.scan_files`."""
    from ckptguard.scan import files

    return files.scan_files(storage, keys, options, progress)


def digest_places(storage: Storage, key: str, places: Sequence[tuple[int, int]]) -> tuple[str | None, ...]:
    """See `ckptguard.scan.files.digest_places`."""
    from ckptguard.scan import files

    return files.digest_places(storage, key, places)
