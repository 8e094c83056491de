"""Import numpy in our commands without its threads for matrix products, which no scan computes.

Starting a thread per processor takes half of a command's start. If a thread cannot be started, numpy's library
interrupts the whole process like a Ctrl-C. In other processes numpy is left alone, because they may multiply matrices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_THREADS = "OPENBLAS_NUM_THREADS"
_COMMANDS = "ckptguard.cli.entry"  # imported only if the process is a command of ours


@contextmanager
def _without_threads() -> Iterator[None]:
    if _THREADS in os.environ or "numpy" in sys.modules or _COMMANDS not in sys.modules:
        yield
        return
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_THREADS, None)  # commands that we start must not inherit it


with _without_threads():
    import numpy as np

__all__ = ["np"]
