"""The loop: it makes passes over all runs, after hints of a change and on a timer, in lanes.

Requests wait for the next pass over their run.
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

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.runs.results import Checked
from ckptguard.runs.work import Work
from ckptguard.scan import Scanner
from ckptguard.scan.process.process_scanner import ProcessScanner
from ckptguard.scan.process.worker_process import limits_of
from ckptguard.values.settings import Settings
from ckptguard_daemon.lanes import Lanes, Turn
from ckptguard_daemon.liveness import WorkStop
from ckptguard_daemon.run_set import RunSet

_MUCH_MEMORY = 64 * 1024**2
_BETWEEN_CLEANINGS = 10.0  # seconds

Notified = Callable[[WatchedRun], None]


class Loop:
    """Makes passes until it is stopped. Any thread may call `wake`, at any rate.

    `after_verdict` and `after_pass` are called in the lane of the run.
    """

    def __init__(
        self, runs: RunSet, stop: threading.Event, after_pass: Notified, after_verdict: Notified = lambda run: None
    ) -> None:
        self._runs, self._stop = runs, WorkStop(stop)
        self._after_pass, self._after_verdict = after_pass, after_verdict
        self._own = threading.local()  # the scanner of a lane
        self._cleaned_at = 0.0
        self.lanes = Lanes(
            "pass", self._pass, stop, storage_of=self._storage_of, end_lane=lambda: self._scanner().close()
        )

    def wake(self, run_id: str | None = None) -> None:
        """Make a pass over one run, or over all, soon."""
        self.lanes.wake([run_id] if run_id is not None else [run.run_id for run in self._runs])

    def has_seen_all(self, run_id: str) -> bool:
        """True if nothing hinted at a change in a run since its last pass began, and no pass is under way."""
        return not self.lanes.expects(run_id)

    def verdicts_first(self, run_id: str) -> bool:
        """True while other work for a run should wait: a checkpoint of it is being verified, or it waits for a lane."""
        turn = self.lanes.turn_of(run_id)
        return self.lanes.is_waiting(run_id) if turn is None else turn.is_reading

    def last_progress(self) -> float:
        """Return when it last made progress, in seconds since 1970. One lane that does so is enough."""
        return max(self._stop.asked_at, self.lanes.last_progress())

    def run(self) -> None:
        """Loop until `stop` is set. Call `wake` after that to end it quickly."""
        self.lanes.wake(run.run_id for run in self._runs)
        self.lanes.run()

    def _storage_of(self, run_id: str) -> str:
        run = self._runs.get(run_id)
        return "" if run is None else run.storage

    def _scanner(self) -> LaneScanner:
        scanner: LaneScanner | None = getattr(self._own, "scanner", None)
        if scanner is None:
            scanner = self._own.scanner = LaneScanner(self._stop)
        return scanner

    def _pass(self, run_id: str, turn: Turn) -> float | None:
        run = self._runs.get(run_id)
        if run is None or self._stop.is_set():
            return None  # it is not guarded any more

        def on_verdict(checked: Checked) -> None:
            turn.is_reading = False
            self._after_verdict(run)

        scanner = self._scanner().by(run.settings)
        done = run.step(Work(scanner=scanner, stop=self._stop, may_begin=turn.may_begin, on_verdict=on_verdict))
        turn.is_reading = False
        if done is not None and done.checked:
            self._give_memory_back()
        self._after_pass(run)
        return run.due - time.monotonic()

    def _give_memory_back(self) -> None:
        """Return freed memory to the system, but not often. The C library would keep it after large manifests, and
        training can use it."""
        now = time.monotonic()
        if now < self._cleaned_at + _BETWEEN_CLEANINGS:
            return
        self._cleaned_at = now
        try:
            with open("/proc/self/statm", encoding="ascii") as file:
                resident = int(file.read().split()[1]) * resource.getpagesize()
            if resident > _MUCH_MEMORY:
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)
        except (OSError, AttributeError):
            pass  # another system, another C library


class LaneScanner:
    """The scanner of one lane. Only the lane's thread uses it, because scanning processes end with the thread that
    started them. It is kept while the settings ask for the same."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._made: tuple[object, ProcessScanner] | None = None

    def by(self, settings: Settings) -> Scanner:
        """Return a scanner by the settings of a run."""
        limits, workers, rate = limits_of(settings), settings.workers or 2, settings.verify_rate
        kind = (limits, workers, rate)
        if self._made is None or self._made[0] != kind:
            self.close()
            # Training's files are more important than ours: drop what was read from the page cache.
            made = ProcessScanner(limits, workers=workers, stop=self._stop, spare_cache=True, rate=lambda: rate)
            self._made = kind, made
        return self._made[1]

    def close(self) -> None:
        """End its processes."""
        if self._made is not None:
            self._made[1].close()
            self._made = None


class Waiters:
    """Wakes coroutines of the HTTP threads: any number of them, without a thread each. Any thread may call `wake`."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, tuple[str, asyncio.AbstractEventLoop]] = {}

    def wake(self, topic: str = "") -> None:
        """Wake all that wait for something. Never raises."""
        for event, (awaited, loop) in self._waiting.copy().items():
            if awaited == topic:
                with contextlib.suppress(RuntimeError):  # that event loop is closed, so nobody waits
                    loop.call_soon_threadsafe(event.set)

    @contextlib.contextmanager
    def woken(self, topic: str = "") -> Iterator[asyncio.Event]:
        """Yield an event to `wait` for later. A call of `wake` in between is not missed."""
        event = asyncio.Event()
        self._waiting[event] = (topic, asyncio.get_running_loop())
        try:
            yield event
        finally:
            del self._waiting[event]

    @staticmethod
    async def wait(event: asyncio.Event, seconds: float) -> bool:
        """Return whether it is woken within `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await event.wait()
        return False
