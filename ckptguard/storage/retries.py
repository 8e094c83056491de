"""Trying again what may pass: bounded in number and time, with jitter, and over at once when called off."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ckptguard.errors import ObjectExistsError, StoppedError, TransientError

T = TypeVar("T")


class RetryClock:
    """The time and the chance by which `Retries` waits."""

    def now(self) -> float:
        """Seconds on a clock that is never set."""
        return time.monotonic()

    def pause(self, seconds: float, stop: threading.Event) -> bool:
        """Wait so long, or until `stop` is set; whether it is."""
        return stop.wait(seconds)

    def chance(self) -> float:
        """A random number from 0 to 1."""
        return random.random()


class Retries:
    """How often and how long to try. Waits grow from `first` to `longest` seconds, each shortened at random by up to
    half, so that many clients of a store in trouble do not come back together.

    `stop` calls it off: a wait ends at once, and no further try is begun.
    """

    def __init__(
        self,
        *,
        attempts: int = 6,
        first: float = 0.25,
        longest: float = 15.0,
        total: float = 90.0,
        stop: threading.Event | None = None,
        clock: RetryClock | None = None,
    ) -> None:
        self.stop = stop if stop is not None else threading.Event()
        self._attempts, self._first, self._longest, self._total = attempts, first, longest, total
        self._clock = clock if clock is not None else RetryClock()

    def run(self, key: str, act: Callable[[], T]) -> T:
        """What `act` returns. Only a TransientError is worth another try; the last one is raised, with their number.
        StoppedError when called off."""
        begun = self._clock.now()
        for attempt in range(1, self._attempts + 1):
            try:
                return self.once(key, act)
            except TransientError as error:
                wait = min(self._first * 2 ** (attempt - 1), self._longest) * (1 - self._clock.chance() / 2)
                if attempt == self._attempts or self._clock.now() - begun + wait > self._total:
                    times = "once" if attempt == 1 else f"{attempt} times"
                    raise TransientError(f"{error.message} (tried {times})", key=error.key, hint=error.hint) from error
                if self._clock.pause(wait, self.stop):
                    raise StoppedError(f"{error.message}; called off while waiting to try again", key=key) from error
        raise AssertionError("attempts must be at least 1")

    def run_exclusive(self, key: str, act: Callable[[], T], is_ours: Callable[[], bool]) -> T | None:
        """The same for what makes something under a key that must be free. A try whose answer was lost may have
        succeeded, and the next one then finds the key taken: None, if `is_ours` says that this is what happened."""
        unclear = False

        def attempt() -> T | None:
            nonlocal unclear
            try:
                return act()
            except TransientError:
                unclear = True
                raise
            except ObjectExistsError:
                if not unclear or not is_ours():
                    raise
                return None

        return self.run(key, attempt)

    def once(self, key: str, act: Callable[[], T]) -> T:
        """What `act` returns, not begun when called off before."""
        if self.stop.is_set():
            raise StoppedError(f"{key}: called off", key=key)
        return act()
