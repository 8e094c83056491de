"""Lower our priority for processors and disks, so that training comes first."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import time

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IO_LOWEST = 2 << 13 | 7  # best effort, lowest priority
_IO_IDLE = 3 << 13
NICENESS = 10  # of what is done beside training
_LOWEST = 19
_ATTEMPTS, _BETWEEN = 10, 0.11


def lower_priority(niceness: int = NICENESS) -> None:
    """Lower the priority of the calling thread, and of what it starts, to this niceness."""
    # Not os.nice: the starting thread may have a lower priority already.
    with contextlib.suppress(OSError):  # a sandbox may refuse even this
        os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    _lower_io(_IO_LOWEST)


def yield_to_all() -> None:
    """Let this process, which has one thread, use only what all others leave of processors and disks.

    It cannot go back without privileges. Never call it in a process that may hold a lock that others wait for: beside a
    busy training they would wait for seconds.
    """
    lower_session(_LOWEST)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _lower_io(_IO_IDLE)


def leads_session() -> bool:
    """True if this process leads a session, so that it is apart from training for Linux's scheduler."""
    return os.getsid(0) == os.getpid()


def lower_session(niceness: int = NICENESS) -> None:
    """Give the session that this process leads this niceness as a whole.

    Where Linux has autogroups, it shares processors between sessions first. So without this, a session apart from
    training takes as much as all of training, whatever the priority of its threads.
    """
    for _ in range(_ATTEMPTS if leads_session() else 0):
        try:
            with open("/proc/self/autogroup", "w", encoding="ascii") as file:
                file.write(str(niceness))
            return
        except BlockingIOError:
            time.sleep(_BETWEEN)  # the whole system allows one change in a tenth of a second
        except OSError:
            return  # there are no autogroups, or a sandbox refuses it


def _lower_io(priority: int) -> None:
    number = _IOPRIO_SET.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, priority)
