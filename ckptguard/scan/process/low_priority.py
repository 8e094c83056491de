"""Lower our priority for processors and disks, so that training comes first."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IO_LOWEST = 2 << 13 | 7  # best effort, lowest priority


def lower_priority(niceness: int) -> None:
    """Lower the priority of the calling thread, and of what it starts, to this niceness."""
    # Not os.nice: the starting thread may have a lower priority already.
    with contextlib.suppress(OSError):  # a sandbox may refuse even this
        os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    number = _IOPRIO_SET.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IO_LOWEST)
