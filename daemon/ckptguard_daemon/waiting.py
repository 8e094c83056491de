"""Requests that wait for a pass: any number of them, without a thread each."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Passes:
    """Lets coroutines of the HTTP thread wait for the loop's next pass."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def done(self) -> None:
        """A pass is done. Called by the loop's thread."""
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # that event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(event.set)

    def expect(self) -> Expected:
        """Take note now, wait later: a pass in between is not missed."""
        return Expected(self, asyncio.get_running_loop())

    def _add(self, entry: tuple[asyncio.AbstractEventLoop, asyncio.Event]) -> None:
        with self._lock:
            self._waiting.add(entry)

    def _remove(self, entry: tuple[asyncio.AbstractEventLoop, asyncio.Event]) -> None:
        with self._lock:
            self._waiting.discard(entry)


class Expected:
    """The next pass after this was made."""

    def __init__(self, passes: Passes, loop: asyncio.AbstractEventLoop) -> None:
        self._passes = passes
        self._entry = (loop, asyncio.Event())
        passes._add(self._entry)

    async def wait(self, seconds: float) -> None:
        """Return when the pass is done, or after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._entry[1].wait()
        except TimeoutError:
            pass

    def forget(self) -> None:
        """Nobody will wait."""
        self._passes._remove(self._entry)
