"""Where the work of a scan runs: in the caller's thread or in several (`scan/process/` has processes)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

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


def executor_of(workers: int) -> Executor:
    """Runs what is submitted in so many threads; with one, in the thread that submits."""
    return InlineExecutor() if workers <= 1 else ThreadPoolExecutor(workers, "ckptguard-scan")
