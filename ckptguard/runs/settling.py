"""Is a save quiet? Two equal samples `settle` seconds apart, or files that are older than that."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckptguard.layouts import Checkpoint


def youngest_age(checkpoint: Checkpoint) -> float | None:
    """Seconds since the newest file was written, by its mtime; None where no mtime is known or one lies ahead."""
    times = [e.mtime_ns for e in (*checkpoint.entries, *checkpoint.irregular)]
    known = [t for t in times if t is not None]
    if not known or len(known) < len(times):
        return None
    age = time.time() - max(known) / 1e9
    return age if age >= 0 else None


def wait_until_quiet(
    checkpoint: Checkpoint, relist: Callable[[], Checkpoint | None], *, settle: float, limit: float
) -> Checkpoint | None:
    """The checkpoint once it is quiet; None if it goes on changing (or vanishes) for `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        age = youngest_age(checkpoint)
        if age is not None and age >= settle:
            return checkpoint
        pause = settle if age is None else max(settle - age, 0.0)
        if time.monotonic() + pause > deadline:
            return None
        time.sleep(pause)
        again = relist()
        if again is None:
            return None
        if again.signature == checkpoint.signature:
            return again
        checkpoint = again
