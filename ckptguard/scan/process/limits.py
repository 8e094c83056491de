"""What a process that works for us with hostile files, or for others, does first: limit itself, and not outlive us."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_OPEN_FILES = 256


def limit_process(memory: int) -> None:
    """Limit this process to this many bytes of address space, without core files and with few open files."""
    for what, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, _OPEN_FILES)):
        hard = resource.getrlimit(what)[1]  # an existing lower limit cannot be raised
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def die_with(parent: int) -> None:
    """Have the system end this process with the one that started it."""
    with contextlib.suppress(OSError, AttributeError):  # otherwise a closed stdin ends us between two scans
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was killed before that line
        sys.exit(0)
