"""The loop: one thread that makes passes over all runs, after hints of a change and on a timer.

Requests wait for its next pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import resource
import threading
import time
from collections.abc import Callable, Iterator

from ckptguard.scan import Scanner
from ckptguard_daemon.guarded import WatchedRun
from ckptguard_daemon.roster import Roster

_GAP = 0.5  # seconds between two passes over a run that is written to all the time
_LONGEST_SLEEP = 60.0
_MUCH_MEMORY = 64 * 1024**2


class Loop:
    """Makes passes until it is stopped. Any thread may call `wake`, at any rate."""

    def __init__(
        self, runs: Roster, scanner: Scanner, stop: threading.Event, after_pass: Callable[[WatchedRun], None]
    ) -> None:
        self._runs, self._scanner, self._stop, self._after_pass = runs, scanner, stop, after_pass
        self.idle = threading.Event()  # nothing is being verified
        self._changed = threading.Condition()
        self._woken: set[str] = set()
        self._under_way: str | None = None
        self._last: dict[str, float] = {}

    def wake(self, run_id: str | None = None) -> None:
        """Make a pass over one run, or over all, soon."""
        with self._changed:
            self._woken.update([run_id] if run_id is not None else [run.run_id for run in self._runs])
            self._changed.notify()

    def has_seen_all(self, run_id: str) -> bool:
        """True if nothing hinted at a change in a run since its last pass began."""
        with self._changed:
            return run_id not in self._woken and run_id != self._under_way

    def run(self) -> None:
        """Loop until `stop` is set. Call `wake` after that to end it quickly."""
        while not self._stop.is_set():
            due = self._next()
            if due is None:
                continue
            self.idle.clear()
            due.step(self._scanner, self._stop)
            self.idle.set()
            with self._changed:
                self._under_way = None
            _give_memory_back()
            self._last[due.run_id] = time.monotonic()
            self._after_pass(due)

    def _next(self) -> WatchedRun | None:
        """Return the run whose pass is due, or None after sleeping until one may be."""
        with self._changed:
            now = time.monotonic()
            waits = [(self._wait(run, now), run) for run in self._runs]
            wait, first = min(waits, key=lambda one: one[0], default=(_LONGEST_SLEEP, None))
            if first is None or (wait > 0 and not self._stop.is_set()):
                self._changed.wait(min(wait, _LONGEST_SLEEP))
                return None
            self._woken.discard(first.run_id)
            self._under_way = first.run_id
            return first

    def _wait(self, run: WatchedRun, now: float) -> float:
        if run.run_id in self._woken:
            return self._last.get(run.run_id, 0.0) + _GAP - now
        return run.due - now


class Passes:
    """Lets coroutines of the HTTP thread wait for the loop's next pass: any number of them, without a thread each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def done(self) -> None:
        """Signal that a pass is done. The loop's thread calls it."""
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # that event loop is closed, so nobody waits
                loop.call_soon_threadsafe(event.set)

    @contextlib.contextmanager
    def next(self) -> Iterator[asyncio.Event]:
        """Yield an event to `wait` for later. A pass in between is not missed."""
        entry = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._waiting.add(entry)
        try:
            yield entry[1]
        finally:
            with self._lock:
                self._waiting.discard(entry)

    async def wait(self, passed: asyncio.Event, seconds: float) -> None:
        """Return when the pass is done, or after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await passed.wait()


def _give_memory_back() -> None:
    """Return freed memory to the system. The C library would keep it after large manifests, and training can use it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize()
        if resident > _MUCH_MEMORY:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass  # another system, another C library
