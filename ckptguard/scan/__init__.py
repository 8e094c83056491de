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
    """Return the scanner that the settings select. `rate`: the most bytes a second."""

    def scan(
        storage: Storage, keys: Sequence[str], options: ScanOptions | None = None, progress: Progress | None = None
    ) -> Scan:
        options = msgspec.structs.replace(options or ScanOptions(), workers=settings.workers, rate=rate)
        return scan_files(storage, keys, options, progress)

    return scan


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
