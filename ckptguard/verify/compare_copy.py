"""Read a copy of a checkpoint, wherever it lies, and hold it against its manifest."""

from __future__ import annotations

from ckptguard.checks.digests import same_content
from ckptguard.errors import ObjectMissingError
from ckptguard.scan import Progress, Scanner, ScanOptions
from ckptguard.storage import Storage
from ckptguard.values.manifest import Manifest


def copy_differs(
    storage: Storage, prefix: str, manifest: Manifest, *, scanner: Scanner, progress: Progress | None = None
) -> str | None:
    """What is wrong with the copy whose files lie under `prefix` + their path in the run; None if every byte is as
    it was sealed. Raises only what says nothing about the bytes."""
    keys = [prefix + f.path for f in manifest.files]
    try:
        scan = scanner(storage, keys, ScanOptions(md5=False), progress)
    except ObjectMissingError as error:
        return f"{error.key.removeprefix(prefix)} is not there"
    for sealed, found in zip(manifest.files, scan.files, strict=True):
        if not same_content(sealed, found):
            return f"{sealed.path} is not what was sealed"
    return None
