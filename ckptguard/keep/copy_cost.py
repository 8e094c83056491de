"""Own bytes: what a kept copy takes on storage that would be free without it."""

from __future__ import annotations

import contextlib
import os
import stat

from ckptguard.errors import ObjectMissingError
from ckptguard.records.kept import KeptCopy
from ckptguard.records.run import Run
from ckptguard.storage.protocol import Entry

_BLOCK = 512  # what st_blocks counts in, whatever the file system's own blocks are


def own_bytes(run: Run, copy: KeptCopy) -> int | None:
    """Bytes of a kept copy that nothing else holds. A hard link costs nothing while another name of the file lives; a
    reflink shares blocks that cannot be counted: None. On an object store, and of a copy, every byte counts. A server
    that does not tell links apart is taken to hold one where the checkpoint's own file has its size and time."""
    if copy.how == "reflink":
        return None
    total = 0
    for file in copy.files:
        if run.records.root is None:
            with contextlib.suppress(ObjectMissingError):
                kept = run.records.stat(copy.key(file))
                total += 0 if copy.how == "link" and _is_in_place(run, file, kept) else kept.size
            continue
        try:
            info = os.lstat(os.path.join(run.records.root, *copy.key(file).split("/")))
        except OSError:
            continue
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 1:
            total += info.st_blocks * _BLOCK
    return total


def _is_in_place(run: Run, file: str, kept: Entry) -> bool:
    try:
        there = run.storage.stat(file)
    except ObjectMissingError:
        return False
    return kept.mtime_ns is not None and (there.size, there.mtime_ns) == (kept.size, kept.mtime_ns)
