"""Scrubbing: one thread that reads again what was verified long ago, while the loop has nothing to do."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from ckptguard.documents.build import fields
from ckptguard.errors import CkptguardError
from ckptguard.incidents.notify import Hooks
from ckptguard.layouts import Checkpoint
from ckptguard.records.scrubs import Where
from ckptguard.repair.scrub import Due, Reread, Scrubbed, ScrubListener, ScrubOrder, scrub
from ckptguard.runs.work import Work
from ckptguard.scan.process.low_priority import lower_priority
from ckptguard.scan.reread import ReadingStopped
from ckptguard.values.settings import Settings
from ckptguard_daemon.guarded import WatchedRun
from ckptguard_daemon.log import log
from ckptguard_daemon.scrub_state import PlaceAt, ScrubState

_LOWEST = 19
_TICK = 0.5  # seconds
_SOONEST, _LATEST = 60.0, 3600.0  # seconds between two looks at what is due
_AGAIN = 86400.0  # seconds until what could not be told is read again


class Scrubbing:
    """Scrubs the runs in turn. `idle` is set while the loop does nothing; a block is read only then. What differs in
    place is verified by the loop, which is woken."""

    def __init__(
        self,
        runs: Sequence[WatchedRun],
        settings: Settings,
        hooks: Hooks,
        idle: threading.Event,
        wake: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self._runs = [run for run in runs if settings.scrub_seconds(local=os.path.isabs(run.url)) is not None]
        self._settings = settings
        self._hooks = hooks
        self._idle = idle
        self._wake = wake
        self._stop = stop
        self._due: dict[str, float] = {}  # monotonic
        self._left_out: dict[str, dict[Where, float]] = {}
        for run in self._runs:
            run.scrub = ScrubState(every=self._every(run), rate=settings.scrub_rate)

    def start(self) -> threading.Thread | None:
        """Begin, if any run is to be scrubbed."""
        if not self._runs:
            return None
        thread = threading.Thread(target=self._run, name="scrub", daemon=True)
        thread.start()
        return thread

    def _every(self, run: WatchedRun) -> float:
        return self._settings.scrub_seconds(local=os.path.isabs(run.url)) or 0.0

    def _run(self) -> None:
        if self._settings.niceness and sys.platform == "linux":
            with contextlib.suppress(OSError):
                lower_priority(_LOWEST)
        while not self._stop.wait(_TICK):
            for run in self._runs:
                now = time.monotonic()
                if run.state != "guarded" or not run.passes or now < self._due.get(run.run_id, 0.0):
                    continue
                try:
                    pause = self._scrub(run)
                except ReadingStopped:
                    return
                except CkptguardError as error:
                    log("not_scrubbed", level="warning", run=run.url, reason=error.message)
                    pause = _LATEST
                except Exception as error:
                    log("not_scrubbed", level="error", trace=True, run=run.url, reason=type(error).__name__)
                    pause = _LATEST
                self._due[run.run_id] = time.monotonic() + pause

    def _scrub(self, run: WatchedRun) -> float:
        """Read what is due; returns the seconds until the next look."""
        left_out = self._left_out.setdefault(run.run_id, {})
        for where in [where for where, until in left_out.items() if time.monotonic() >= until]:
            del left_out[where]
        every = self._every(run)
        state = run.scrub or ScrubState(every=every, rate=self._settings.scrub_rate)

        def begin(due: Due) -> None:
            # Until it is told what became of it: what cannot be read is not read over and over.
            left_out[due.where] = time.monotonic() + min(_AGAIN, every)
            run.scrub = msgspec.structs.replace(state, reading=_place(due, None))

        def end(done: Reread) -> None:
            nonlocal state
            found = PlaceAt(path=done.path, id=done.id, place=done.place, at=time.time())
            run.scrub = state = msgspec.structs.replace(state, last=found)
            log("scrubbed", run=run.url, **fields(done, findings=[]))

        def verify(checkpoint: Checkpoint) -> None:
            run.ask(checkpoint.path)
            self._wake(run.run_id)

        done = scrub(
            run.look(),
            ScrubOrder(max_age=every, leave_out=dict(left_out)),
            hold=self._hold,
            watcher=ScrubListener(verify=verify, tell=self._hooks.tell, begin=begin, end=end, source="daemon"),
            work=Work(rate=self._settings.scrub_rate),
        )
        for sentence in done.could_not_tell:
            log("could_not_tell", level="warning", run=run.url, reason=sentence)
        if any(one.place == "kept" and one.outcome.value == "bad" for one in done.places):
            run.mend_soon()
            self._wake(run.run_id)
        if self._stop.is_set():
            raise ReadingStopped
        run.scrub = _state_after(state, done, every)
        wait = (done.next.last or 0.0) + every - time.time() if done.next is not None else _LATEST
        return max(min(wait, _LATEST), min(_SOONEST, every))

    def _hold(self) -> None:
        while not self._stop.is_set():
            if self._idle.wait(_TICK):
                return
        raise ReadingStopped


def _state_after(state: ScrubState, done: Scrubbed, every: float) -> ScrubState:
    next_at = None if done.next is None else max((done.next.last or 0.0) + every, time.time())
    return msgspec.structs.replace(
        state,
        reading=None,
        last=state.last or (_place(done.last, done.last.last) if done.last is not None else None),
        next=_place(done.next, next_at) if done.next is not None else None,
    )


def _place(due: Due, at: float | None) -> PlaceAt:
    return PlaceAt(path=due.path, id=due.id, place=due.place, at=at)
