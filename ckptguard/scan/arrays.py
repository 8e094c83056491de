"""numpy, without the threads that it starts for each processor to multiply matrices, which no scan does.

Starting them costs as much processor time as half of a command's start. Where one cannot be started, numpy's library
interrupts the whole process, as a Ctrl-C does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_THREADS = "OPENBLAS_NUM_THREADS"


@contextmanager
def _without_threads() -> Iterator[None]:
    if _THREADS in os.environ:
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
