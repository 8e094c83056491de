"""Let one process at a time move or remove files of a run. Only local runs have this lock.

Without locks, exclusive names and records still keep two processes apart: one of them fails instead of waiting.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from ckptguard.errors import BusyError
from ckptguard.records.run import Run
from ckptguard.storage.failures import storage_error, translated
from ckptguard.storage.local.writes import NO_LOCKS, open_lock
from ckptguard.values.own_log import log as _log

_POLL = 0.05
_reported: set[str] = set()  # records without locks that this process has warned about


@contextlib.contextmanager
def run_lock(run: Run, *, timeout: float = 20.0, name: str = "lock") -> Iterator[None]:
    """Hold the kernel's lock on the run, or its lock of this `name`. Without lock support there is one warning and no
    lock.

    Raises:
        BusyError: another process held it for `timeout` seconds.
        StorageError: the records cannot be reached.
    """
    root = run.records.root
    if root is None:
        yield
        return
    import fcntl

    with translated("lock", root):
        handle = open_lock(root, name)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BusyError(
                        f"another process is moving files of {run.url}; try again when it has finished"
                    ) from None
                time.sleep(_POLL)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise storage_error(error, "lock", root) from error
                _tell_once(run, error)
                break
        yield
    finally:
        # Closing the file does not release the lock: a process forked meanwhile (a data loader worker) has it open,
        # too.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _tell_once(run: Run, error: OSError) -> None:
    if run.records.url not in _reported:
        _reported.add(run.records.url)
        why = (error.strerror or "").lower()
        _log.warning("%s does not support locks (%s); let only one process at a time move its files", run.url, why)
