"""One thread for work that must never hold up who gave it: low priority, and the process may end without it."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Background:
    """Does what is submitted, one after the other, in a thread that lives as long as the process, with some
    `niceness`."""

    def __init__(self, name: str, niceness: int) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._niceness = niceness
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], Result], when_done: Callable[[], None]) -> Future[Result]:
        """The future of a call; `when_done` is called in the thread, afterwards."""
        future: Future[Result] = Future()
        future.add_done_callback(lambda _: when_done())
        self._work.put((future, call))
        return future

    def _run(self) -> None:
        try:
            thread = threading.get_native_id()  # this alone, and what it starts
            os.setpriority(os.PRIO_PROCESS, thread, max(self._niceness, os.getpriority(os.PRIO_PROCESS, thread)))
        except (OSError, AttributeError):
            pass
        while True:
            future, call = self._work.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
