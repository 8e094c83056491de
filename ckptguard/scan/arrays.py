"""numpy, in a command without the threads that it starts for each processor to multiply matrices: no scan does that.

Starting them costs as much processor time as half of a command's start. Where one cannot be started, numpy's library
interrupts the whole process, as a Ctrl-C does. In a process that is not ours, others may multiply.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_THREADS = "OPENBLAS_NUM_THREADS"
_COMMANDS = "ckptguard.cli.entry"  # loaded where the process is a command of ours


@contextmanager
def _without_threads() -> Iterator[None]:
    if _THREADS in os.environ or "numpy" in sys.modules or _COMMANDS not in sys.modules:
        yield
        return
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_THREADS, None)  # the commands that we start are none of this


with _without_threads():
    import numpy as np

__all__ = ["np"]
