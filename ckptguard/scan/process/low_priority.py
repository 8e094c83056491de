"""Stand back from training: last in line for processors and disks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IO_LOWEST = 2 << 13 | 7  # best effort, last in line


def lower_priority(niceness: int) -> None:
    """Have the calling thread, and what it starts, stand back by so much."""
    # Not os.nice: the thread that started us may stand back already.
    with contextlib.suppress(OSError):  # a sandbox may refuse even this
        os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    number = _IOPRIO_SET.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IO_LOWEST)
