"""The options of a scan."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec

from ckptguard.formats.structure import Structure
from ckptguard.scan.result import Scan
from ckptguard.storage.protocol import Storage

_MOST = 8  # more threads wait for each other's Python and need more memory; training needs its processors, too


class ScanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a scan.

    - `md5`: also compute each file's MD5. `sums`: more whole-file digests ("sha256", "git-sha1", ...; see
      `new_hasher`).
    - `workers`: threads that read and hash in parallel (0: one per processor), each with one more per whole-file
      digest. With 1, everything happens in the caller's thread.
    - `rate`: bytes per second that all of them together read at most.
    - `spare_cache`: drop read bytes from the page cache, so that a daemon does not evict training's files. Not for a
      user who loads the file next.
    - `yield_for`: for this number of seconds a scanning process may leave the processors to everything else. Then it
      scans again, at the priority of the settings. None: it does not wait at all.
    - `structures`: those of files that a plugin has read, by key. Such files are not parsed here.
    - `structure_only`: read only the structures; digests and numbers are empty. Hostile files need the same scanner.
    """

    md5: bool = True
    sums: tuple[str, ...] = ()
    workers: int = 0
    rate: float | None = None
    spare_cache: bool = False
    yield_for: float | None = None
    structure_only: bool = False
    structures: dict[str, Structure] = {}


Progress = Callable[[int], None]  # bytes since the last call, may be 0; other threads may call it
Scanner = Callable[[Storage, Sequence[str], ScanOptions, Progress | None], Scan]


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(len(os.sched_getaffinity(0)), 1)
    return os.cpu_count() or 1


def workers_of(wanted: int) -> int:
    """Return how many threads to use: `wanted`, or for 0 one per processor, within limits."""
    return wanted or min(processors(), _MOST)
