"""A bounded memory of values that are made again at a cost. Pure."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any


class Remembered:
    """Values that were made from immutable records, within a bound of bytes. The oldest used ones go first."""

    def __init__(self, most_bytes: int) -> None:
        self._lock = threading.Lock()
        self._most, self._bytes = most_bytes, 0
        self._held: OrderedDict[object, tuple[Any, int]] = OrderedDict()

    def get(self, key: object) -> Any:
        """Return the value, or None."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                return None
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: object, value: object, size: int) -> None:
        """Remember a value that takes about `size` bytes."""
        with self._lock:
            self._bytes += size - self._held.pop(key, (None, 0))[1]
            self._held[key] = value, size
            while self._bytes > self._most:
                self._bytes -= self._held.popitem(last=False)[1][1]

    def drop(self, key: object) -> None:
        """Forget a value."""
        with self._lock:
            self._bytes -= self._held.pop(key, (None, 0))[1]
