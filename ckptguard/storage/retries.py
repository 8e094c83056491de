"""Trying again what may pass: bounded in number and time, with jitter, and over at once when called off."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ckptguard.errors import StoppedError, TransientError

T = TypeVar("T")


class Retries:
    """How often and how long to try. Waits grow from `first` to `longest` seconds, each shortened at random by up to
    half, so that many clients of a store in trouble do not come back together.

    `stop` calls it off: a wait ends at once, and no further try is begun. `now` and `pause` (which returns whether it
    was called off) are the clock.
    """

    def __init__(
        self,
        *,
        attempts: int = 6,
        first: float = 0.25,
        longest: float = 15.0,
        total: float = 90.0,
        stop: threading.Event | None = None,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], bool] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.stop = stop if stop is not None else threading.Event()
        self._attempts, self._first, self._longest, self._total = attempts, first, longest, total
        self._now, self._pause, self._chance = now, pause or self.stop.wait, chance

    def run(self, key: str, act: Callable[[], T]) -> T:
        """What `act` returns. Only a TransientError is worth another try; the last one is raised, with their number.
        StoppedError when called off."""
        begun = self._now()
        for attempt in range(1, self._attempts + 1):
            try:
                return self.once(key, act)
            except TransientError as error:
                wait = min(self._first * 2 ** (attempt - 1), self._longest) * (1 - self._chance() / 2)
                if attempt == self._attempts or self._now() - begun + wait > self._total:
                    times = "once" if attempt == 1 else f"{attempt} times"
                    raise TransientError(f"{error.message} (tried {times})", key=error.key, hint=error.hint) from error
                if self._pause(wait):
                    raise StoppedError(f"{error.message}; called off while waiting to try again", key=key) from error
        raise AssertionError("attempts must be at least 1")

    def once(self, key: str, act: Callable[[], T]) -> T:
        """What `act` returns, not begun when called off before."""
        if self.stop.is_set():
            raise StoppedError(f"{key}: called off", key=key)
        return act()
