"""What a caller may ask of a scan."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec

from ckptguard.scan.result import Scan
from ckptguard.storage.protocol import Storage

_MOST = 8  # more threads wait for each other's Python and want more memory; then training wants its processors too


class ScanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`md5`: take each file's MD5 too. `sums`: further whole-file digests ("sha256", "git-sha1", ...: `digest_names`).

    `spare_cache`: tell the storage as soon as bytes will not be read again, so that a daemon does not push training's
    files out of the page cache; not for a user who loads the file next. `workers`: how many threads read and hash side
    by side (0: as many as there are processors), each with one more for each whole-file digest; with 1, everything
    happens in the caller's thread. `rate`: bytes a second that all of them together read at most.

    `structure_only`: read what the structures need and no more; digests and numbers are then empty. Hostile files are
    parsed for that too, so it goes through the same scanner.
    """

    md5: bool = True
    sums: tuple[str, ...] = ()
    workers: int = 0
    rate: float | None = None
    spare_cache: bool = False
    structure_only: bool = False


Progress = Callable[[int], None]  # bytes done since the last call, may be 0; may be called from other threads
Scanner = Callable[[Storage, Sequence[str], ScanOptions, Progress | None], Scan]


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(len(os.sched_getaffinity(0)), 1)
    return os.cpu_count() or 1


def workers_of(wanted: int) -> int:
    """How many threads to work in: as many as wanted; for 0 as many as there are processors, within reason."""
    return wanted or min(processors(), _MOST)
