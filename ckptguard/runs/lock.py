"""One process at a time moves or removes files of a run. Local runs only: elsewhere records are idempotent."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from ckptguard.errors import BusyError, DeniedError
from ckptguard.records.run import Run

_POLL = 0.05


@contextlib.contextmanager
def run_lock(run: Run, *, timeout: float = 20.0) -> Iterator[None]:
    """Hold the kernel's lock on the run; BusyError if another process holds it for longer than `timeout` seconds."""
    root = run.records.root
    if root is None:
        yield
        return
    import fcntl

    try:
        os.makedirs(root, exist_ok=True)
        handle = os.open(os.path.join(root, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise DeniedError(f"the records of {run.url} cannot be locked: {error.strerror}", key="lock") from error
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BusyError(f"another process is moving files of {run.url}") from None
                time.sleep(_POLL)
        yield
    finally:
        # Closing alone does not free it: a process that was forked meanwhile (a data loader's worker) has it open too.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
