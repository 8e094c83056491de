"""The one pass over the bytes: digests and numbers. Importing it is cheap; the first scan loads what it needs."""

from __future__ import annotations

from collections.abc import Sequence

from ckptguard.scan.options import Progress, Scanner, ScanOptions
from ckptguard.scan.result import Numbers, Scan, ScannedFile
from ckptguard.storage.protocol import Storage

__all__ = ["Numbers", "Progress", "Scan", "ScanOptions", "ScannedFile", "Scanner", "digest_places", "scan_files"]


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
