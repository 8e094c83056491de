"""The runs that the daemon guards. They may come and go while it works."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from ckptguard.engine.watched_run import WatchedRun


class Roster:
    """The guarded runs in the order in which they came. Any thread may read or change it.

    Iterating shows the runs of one moment. A run that was removed meanwhile is still safe to use.
    """

    def __init__(self, runs: Iterable[WatchedRun] = ()) -> None:
        self._lock = threading.Lock()
        self._runs = {run.run_id: run for run in runs}

    def __iter__(self) -> Iterator[WatchedRun]:
        with self._lock:
            return iter(tuple(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, run_id: str) -> WatchedRun | None:
        """Return the run with this id, or None."""
        return self._runs.get(run_id)

    def add(self, run: WatchedRun) -> None:
        """Guard a run from now on. One with the same id is replaced."""
        with self._lock:
            self._runs = {**self._runs, run.run_id: run}

    def remove(self, run_id: str) -> WatchedRun | None:
        """Guard a run no longer. Returns it, or None if it was not there."""
        with self._lock:
            runs = dict(self._runs)
            gone = runs.pop(run_id, None)
            self._runs = runs
            return gone
