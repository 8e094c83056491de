"""What the daemon does while the loop is idle: update replicas, and read old checkpoints again. Each has its own
thread."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import ClassVar

import msgspec

from ckptguard.documents.build import fields
from ckptguard.errors import CkptguardError, StoppedError
from ckptguard.layouts import Checkpoint
from ckptguard.records.scrubs import Where
from ckptguard.repair.scrub import Due, Reread, Scrubbed, ScrubListener, ScrubOrder, scrub
from ckptguard.replicas.replicate import Replica, replica_urls, replicate
from ckptguard.reporting.events import replica_event
from ckptguard.reporting.notify import Hooks
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.scan.process.low_priority import lower_priority
from ckptguard.scan.reread import ReadingStopped
from ckptguard.storage.failures import machine_trouble
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard_daemon.guarded import PlaceAt, ScrubState, WatchedRun
from ckptguard_daemon.log import log

_LOWEST = 19
_TICK = 0.5  # seconds
_LATEST_COPY = 600.0  # seconds until a check without a new verdict: other processes write records, too
_LONGEST_PAUSE = 3600.0  # seconds until a failing replica is tried again
_SOONEST_SCRUB, _LATEST_SCRUB = 60.0, 3600.0  # seconds between two checks for what is due
_AGAIN = 86400.0  # seconds until an unreadable place is read again


class IdleWork:
    """One thread of the lowest priority that works for the runs in turn, while `idle` says that the loop is idle."""

    name: ClassVar[str]
    failed: ClassVar[str]  # the event of a log's line

    def __init__(
        self,
        runs: Iterable[WatchedRun],
        settings: Settings,
        hooks: Hooks,
        idle: threading.Event | None,
        wake: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self._runs, self._settings, self._hooks = runs, settings, hooks
        self._idle, self._wake, self._stop = idle, wake, stop
        self._prepare()

    def _prepare(self) -> None:
        """Begin notes."""

    def start(self) -> threading.Thread:
        """Start."""
        thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        thread.start()
        return thread

    def once(self) -> None:
        """Do what is due for each run now."""
        for run in self._runs:
            if run.state == "guarded" and run.passes and not self._stop.is_set():
                try:
                    self._work(run)
                except CkptguardError as error:
                    log(self.failed, level="warning", run=run.url, reason=error.message)
                except Exception as error:
                    told = machine_trouble(error)
                    reason = type(error).__name__ if told is None else told.message
                    log(self.failed, level="error", trace=told is None, run=run.url, reason=reason)

    def _run(self) -> None:
        if self._settings.niceness and sys.platform == "linux":
            with contextlib.suppress(OSError):
                lower_priority(_LOWEST)
        while not self._stop.wait(_TICK):
            self.once()

    def _work(self, run: WatchedRun) -> None:
        raise NotImplementedError

    def _may_go_on(self) -> bool:
        """Wait while the loop works. False if it must stop meanwhile."""
        while self._idle is not None and not self._idle.wait(_TICK):
            if self._stop.is_set():
                return False
        return True


class _Place(msgspec.Struct, kw_only=True):
    """What is remembered about one replica, only to save work."""

    due: float = 0.0  # monotonic
    verdicts: int = -1  # of the run, at the last update
    failures: int = 0
    arrived: set[CheckpointId] = msgspec.field(default_factory=set)


class Replicating(IdleWork):
    """Updates the replicas of the runs. A block is sent only while the loop is idle.

    A failing replica is reported once, and tried again after growing pauses. Nothing waits for it.
    """

    name, failed = "replicate", "not_replicated"

    def _prepare(self) -> None:
        self._places: dict[tuple[str, str], _Place] = {}

    def _work(self, guarded: WatchedRun) -> None:
        verdicts, now = guarded.verdicts, time.monotonic()
        for url in self._urls(guarded):
            place = self._places.setdefault((guarded.run_id, url), _Place())
            news = place.verdicts != verdicts and not place.failures
            if (now < place.due and not news) or self._stop.is_set():
                continue
            view = guarded.look()  # again for each replica: one may take hours
            place.due = time.monotonic() + _LATEST_COPY  # also if it raises
            done = self._replicate(view, url, place)
            if self._stop.is_set():
                return
            place.verdicts = verdicts
            self._tell(guarded, view, place, done)

    def _urls(self, guarded: WatchedRun) -> tuple[str, ...]:
        return replica_urls(guarded.url, guarded.settings)

    def _replicate(self, view: RunView, url: str, place: _Place) -> Replica:
        work = Work(rate=view.settings.replica_rate, stop=self._stop)
        try:
            done = replicate(view, url, work=work, hold=self._hold, arrived=place.arrived)
        except CkptguardError as error:
            done = Replica(url=url, behind=None, last_good=None, trouble=error.message)
        failed = next((c.message for c in done.checkpoints if c.done == "failed"), None)
        return msgspec.structs.replace(done, trouble=done.trouble or failed)

    def _tell(self, guarded: WatchedRun, view: RunView, place: _Place, done: Replica) -> None:
        url = done.url
        known = {replica.url: replica for replica in (*guarded.replicas, done)}
        guarded.replicas = tuple(known[u] for u in self._urls(guarded) if u in known)
        for one in done.checkpoints:
            if one.done != "there":
                level = "info" if one.done in ("sent", "raced", "gone") else "warning"
                log("replicated", level=level, run=guarded.url, replica=url, **fields(one))
            if one.done == "damaged":
                guarded.ask(one.path)  # the loop reports bad ones
                self._wake(guarded.run_id)
        if done.trouble is None:
            if place.failures:
                log("replica_recovered", run=guarded.url, replica=url)
            place.failures = 0
            return
        place.failures += 1
        pause = min(guarded.settings.scan_interval * 2.0 ** min(place.failures, 12), _LONGEST_PAUSE)
        place.due = time.monotonic() + pause
        if place.failures == 1:
            log("replica_in_trouble", level="warning", run=guarded.url, replica=url, reason=done.trouble)
            guarded.hooks.tell(replica_event(view.run, url, done.trouble, source="daemon"))

    def _hold(self) -> None:
        if not self._may_go_on():
            raise StoppedError("replication was stopped", key="")


class Scrubbing(IdleWork):
    """Scrubs the runs. A block is read only while the loop is idle. The loop verifies what differs in place."""

    name, failed = "scrub", "not_scrubbed"

    def _prepare(self) -> None:
        self._due: dict[str, float] = {}  # monotonic
        self._left_out: dict[str, dict[Where, float]] = {}

    def _every(self, run: WatchedRun) -> float:
        return run.settings.scrub_seconds(local=os.path.isabs(run.url)) or 0.0

    def _work(self, run: WatchedRun) -> None:
        if not self._every(run):
            run.scrub = None
            return
        if time.monotonic() < self._due.get(run.run_id, 0.0):
            return
        pause = _LATEST_SCRUB
        try:
            pause = self._scrub(run)
        except ReadingStopped:
            pass  # the daemon ends
        finally:
            self._due[run.run_id] = time.monotonic() + pause

    def _scrub(self, run: WatchedRun) -> float:
        """Read what is due. Returns the seconds until the next check."""
        left_out = self._left_out.setdefault(run.run_id, {})
        for where in [where for where, until in left_out.items() if time.monotonic() >= until]:
            del left_out[where]
        every = self._every(run)
        state = run.scrub or ScrubState(every=every, rate=run.settings.scrub_rate)

        def begin(due: Due) -> None:
            # Until the result is known, so that an unreadable place is not read over and over.
            left_out[due.where] = time.monotonic() + min(_AGAIN, every)
            run.scrub = msgspec.structs.replace(state, reading=_place_of(due, None))

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
            watcher=ScrubListener(verify=verify, tell=run.hooks.tell, begin=begin, end=end, source="daemon"),
            work=Work(rate=run.settings.scrub_rate),
        )
        for sentence in done.could_not_tell:
            log("could_not_tell", level="warning", run=run.url, reason=sentence)
        if any(one.place == "kept" and one.outcome.value == "bad" for one in done.places):
            run.mend_soon()
            self._wake(run.run_id)
        if self._stop.is_set():
            raise ReadingStopped
        run.scrub = _state_after(state, done, every)
        wait = (done.next.last or 0.0) + every - time.time() if done.next is not None else _LATEST_SCRUB
        return max(min(wait, _LATEST_SCRUB), min(_SOONEST_SCRUB, every))

    def _hold(self) -> None:
        if self._stop.is_set() or not self._may_go_on():
            raise ReadingStopped


def _state_after(state: ScrubState, done: Scrubbed, every: float) -> ScrubState:
    next_at = None if done.next is None else max((done.next.last or 0.0) + every, time.time())
    return msgspec.structs.replace(
        state,
        reading=None,
        last=state.last or (_place_of(done.last, done.last.last) if done.last is not None else None),
        next=_place_of(done.next, next_at) if done.next is not None else None,
    )


def _place_of(due: Due, at: float | None) -> PlaceAt:
    return PlaceAt(path=due.path, id=due.id, place=due.place, at=at)
