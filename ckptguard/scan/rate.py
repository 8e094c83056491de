"""How fast bytes may be read: a token bucket, kept as the moment from which on more may be read."""

from __future__ import annotations

import threading
from collections.abc import Callable

CATCH_UP = 0.25  # seconds of reading that may be made up for: more would be a burst that training feels


class Rate:
    """Lets so many bytes a second through. Time that was lost, to a slow disk or a sleep that took longer, is made up
    for by at most `CATCH_UP`; time in which nobody read is not saved up beyond that. Threads may share one."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()

    def take(self, length: int) -> float:
        """So many bytes were read; how many seconds to wait before reading more."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - CATCH_UP) + length / self._per_second
            return max(0.0, self._free_at - now)
