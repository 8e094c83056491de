"""Where the work of a scan runs: in the caller's thread or in several (`scan/process/` has processes)."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

_MOST = 8  # more threads wait for each other's Python and want more memory; then training wants its processors too

Result = TypeVar("Result")


class InlineExecutor(Executor):
    """Does each piece of work at once, in the thread that submits it."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """A future that is done."""
        future: Future[Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(len(os.sched_getaffinity(0)), 1)
    return os.cpu_count() or 1


def workers_of(wanted: int) -> int:
    """How many threads to work in: as many as wanted; for 0 as many as there are processors, within reason."""
    return wanted or min(processors(), _MOST)


def executor_of(workers: int) -> Executor:
    """Runs what is submitted in so many threads; with one, in the thread that submits."""
    return InlineExecutor() if workers <= 1 else ThreadPoolExecutor(workers, "ckptguard-scan")
