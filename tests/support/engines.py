"""Engines that users may have: factories for `ckptguard fleet --engine support.engines:NAME`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Later:
    """All that is asked of a future, and nothing else."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._callbacks = work, list[Callable[[Any], Any]]()
        self._ended, self._lock = threading.Event(), threading.Lock()
        threading.Thread(target=self._run).start()

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None:
        """As that of `concurrent.futures`."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(fn)
                return
        fn(self)

    def result(self) -> Any:
        """As that of `concurrent.futures`."""
        assert self._ended.wait(60)
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def cancel(self) -> None:
        """It has begun."""

    def _run(self) -> None:
        try:
            self._found = self._work()
        except Exception as error:
            self._found = error
        with self._lock:
            self._ended.set()
        for called in self._callbacks:
            called(self)


class Threads:
    """All that is asked of an engine: Ray's tasks, for example, behind a `submit`."""

    def submit(self, fn: Callable[..., Any], *args: Any) -> Later:
        """Call it in a thread, and print something, as libraries do."""
        print("something")
        return Later(lambda: fn(*args))


def dask_client() -> Any:
    """A Dask client, as `SLURMCluster(...).get_client()` returns it, here of workers in this process."""
    from distributed import Client, LocalCluster

    cluster: Any = LocalCluster
    connect: Any = Client
    return connect(cluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None))
