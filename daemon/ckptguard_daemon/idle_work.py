"""What the daemon does behind verdicts: update replicas, and read old checkpoints again. Each has its own lanes."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from ckptguard.documents.build import fields
from ckptguard.engine.watched_run import PlaceAt, ScrubState, WatchedRun, storage_of
from ckptguard.errors import CkptguardError, StoppedError
from ckptguard.layouts import Checkpoint
from ckptguard.records.scrubs import Where
from ckptguard.repair.scrub import Due, Reread, Scrubbed, ScrubListener, ScrubOrder, scrub
from ckptguard.replicas.replicate import Replica, replica_urls
from ckptguard.reporting.events import replica_event
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.scan.paced_reader import Rate
from ckptguard.scan.process.low_priority import lower_priority
from ckptguard.scan.reread import ReadingStopped
from ckptguard.storage.failures import machine_trouble
from ckptguard.upkeep.tiers import update_replica
from ckptguard.values.ids import CheckpointId
from ckptguard_daemon.lanes import Lanes, Turn
from ckptguard_daemon.log import log
from ckptguard_daemon.run_set import RunSet

_LOWEST = 19
_TICK = 0.1  # seconds between two checks for something more urgent
_LONGEST_HOLD = 60.0  # seconds that a replica's update waits for what is more urgent, in total
_LATEST_COPY = 600.0  # seconds until a check without a new verdict: other processes write records, too
_LONGEST_PAUSE = 3600.0  # seconds until a failing replica is tried again
_SOONEST_SCRUB, _LATEST_SCRUB = 60.0, 3600.0  # seconds between two checks for what is due
_AGAIN = 86400.0  # seconds until an unreadable place is read again


class IdleWork:
    """Work of low priority for each guarded run, in lanes of its own.

    `urgent` says whether something for a run is more urgent now. `wake` makes the loop look at a run.
    """

    name: ClassVar[str]
    failed: ClassVar[str]  # the event of a log's line

    def __init__(
        self,
        runs: RunSet,
        urgent: Callable[[str], bool],
        wake: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self._runs, self._urgent, self._wake, self._stop = runs, urgent, wake, stop
        self._rates: dict[tuple[str, float], Rate] = {}
        self.lanes = Lanes(self.name, self._turn, stop, storage_of=self._storage_of, begin_lane=self._stand_back)

    def _stand_back(self) -> None:
        # Not SCHED_IDLE: the thread may have Python's lock, which the answers need, too.
        if sys.platform == "linux":
            lower_priority(_LOWEST)

    def _rate(self, storage: str, per_second: float | None) -> Rate | None:
        """Return the limit in bytes per second for what goes to one storage, which all runs share."""
        if per_second is None:
            return None
        return self._rates.setdefault((storage, per_second), Rate(per_second, time.monotonic))

    def _storage_of(self, key: Any) -> str:
        raise NotImplementedError

    def _turn(self, key: Any, turn: Turn) -> float | None:
        raise NotImplementedError

    def _guarded(self, run: WatchedRun, work: Callable[[], float]) -> float:
        """Return the seconds until the next turn. Errors are logged, and never raised."""
        try:
            return work()
        except CkptguardError as error:
            if not run.was_removed():
                log(self.failed, level="warning", run=run.url, reason=error.message)
        except Exception as error:
            reported = machine_trouble(error)
            reason = type(error).__name__ if reported is None else reported.message
            log(self.failed, level="error", trace=reported is None, run=run.url, reason=reason)
        return _LATEST_COPY


class _Place(msgspec.Struct, kw_only=True):
    """What is remembered about one replica, only to save work."""

    verdicts: int = -1  # of the run, at the last update
    failures: int = 0
    arrived: set[CheckpointId] = msgspec.field(default_factory=set)


class Replicating(IdleWork):
    """Updates the replicas of the runs, each in a lane of its own, as soon as there is a verdict.

    A failing replica is reported once, and tried again after growing pauses. Nothing waits for it.
    """

    name, failed = "replicate", "not_replicated"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._places: dict[tuple[str, str], _Place] = {}
        self._telling = threading.Lock()

    def after_pass(self, run: WatchedRun) -> None:
        """Update its replicas if there is a new verdict. Called after each verdict and each pass."""
        for url in replica_urls(run.url, run.settings) if run.state != "waiting" or run.verdicts else ():
            place = self._places.get((run.run_id, url))
            if place is None or (place.verdicts != run.verdicts and not place.failures):
                self.lanes.wake([(run.run_id, url)])

    def is_busy(self, run_id: str) -> bool:
        """True while something is sent to a replica of a run."""
        run = self._runs.get(run_id)
        urls = () if run is None else replica_urls(run.url, run.settings)
        return any(self.lanes.turn_of((run_id, url)) is not None for url in urls)

    def once(self, run: WatchedRun) -> None:
        """Update the replicas of one run now, one after another."""
        for url in replica_urls(run.url, run.settings):
            if run.state == "guarded" and not self._stop.is_set():
                self._guarded(run, lambda url=url: self._update(run, url, Work(stop=self._stop)))  # type: ignore[misc]

    def _storage_of(self, key: tuple[str, str]) -> str:
        return storage_of(key[1])

    def _turn(self, key: tuple[str, str], turn: Turn) -> float | None:
        run, url = self._runs.get(key[0]), key[1]
        if run is None or url not in replica_urls(run.url, run.settings):
            self._places.pop(key, None)
            return None
        work = Work(stop=self._stop, may_begin=turn.may_begin)
        return self._guarded(run, lambda: self._update(run, url, work))

    def _update(self, run: WatchedRun, url: str, work: Work) -> float:
        place = self._places.setdefault((run.run_id, url), _Place())
        verdicts = run.verdicts  # as of before it looks
        view = run.look()  # if that fails, the verdicts still ask for an update
        place.verdicts = verdicts
        rate = self._rate(storage_of(url), run.settings.replica_rate)
        try:
            done = update_replica(
                view,
                url,
                work=msgspec.structs.replace(work, rate=rate),
                hold=self._hold(run.run_id),
                arrived=place.arrived,
            )
        except CkptguardError as error:
            done = Replica(url=url, behind=None, last_good=None, trouble=error.message)
        failed = next((c.message for c in done.checkpoints if c.done == "failed"), None)
        done = msgspec.structs.replace(done, trouble=done.trouble or failed)
        if self._stop.is_set() or run.was_removed():
            return _LATEST_COPY
        return self._tell(run, view, place, done)

    def _tell(self, run: WatchedRun, view: RunView, place: _Place, done: Replica) -> float:
        """Report what was done. Returns the seconds until the next update."""
        url = done.url
        with self._telling:
            before, known = run.replicas, {replica.url: replica for replica in (*run.replicas, done)}
            run.replicas = tuple(known[u] for u in replica_urls(run.url, run.settings) if u in known)
            if before != run.replicas:
                self._wake(run.run_id)  # its next pass notes them in the catalogue
        for one in done.checkpoints:
            if one.done != "there":
                level = "info" if one.done in ("sent", "raced", "gone") else "warning"
                log("replicated", level=level, run=run.url, replica=url, **fields(one))
            if one.done == "damaged":
                run.ask(one.path)  # the loop reports bad ones
                self._wake(run.run_id)
        for gone in done.pruned.removed if done.pruned is not None else ():
            log("pruned_in_replica", run=run.url, replica=url, path=gone.checkpoint.path)
        if done.trouble is None:
            if place.failures:
                log("replica_recovered", run=run.url, replica=url)
            place.failures = 0
            return 0.0 if done.yielded else _LATEST_COPY
        place.failures += 1
        if place.failures == 1:
            log("replica_in_trouble", level="warning", run=run.url, replica=url, reason=done.trouble)
            run.hooks.tell(view.run, replica_event(view.run, url, done.trouble, source="daemon"))
        return float(min(run.settings.scan_interval * 2.0 ** min(place.failures, 12), _LONGEST_PAUSE))

    def _hold(self, run_id: str) -> Callable[[], None]:
        held = 0.0

        def hold() -> None:
            nonlocal held
            while held < _LONGEST_HOLD and self._urgent(run_id):
                held += _TICK
                if self._stop.wait(_TICK):
                    break
            if self._stop.is_set():
                raise StoppedError("replication was stopped", key="")

        return hold


class Scrubbing(IdleWork):
    """Scrubs the runs. A block is read only while nothing else is done for the run. The loop verifies what differs in
    place."""

    name, failed = "scrub", "not_scrubbed"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._left_out: defaultdict[str, dict[Where, float]] = defaultdict(dict)
        self._verdicts: dict[str, int] = {}  # of a run, at its last turn

    def after_pass(self, run: WatchedRun) -> None:
        """Begin to scrub a run after its first pass, and look for missing MD5s after each new verdict."""
        if _to_scrub(run) is not None and run.passes and run.run_id not in self._left_out:
            self._left_out[run.run_id] = {}
            self.lanes.wake([run.run_id])
        elif _takes_late_md5s(run) and self._verdicts.get(run.run_id, run.verdicts) != run.verdicts:
            self.lanes.wake([run.run_id])

    def _storage_of(self, run_id: str) -> str:
        run = self._runs.get(run_id)
        return "" if run is None else run.storage

    def _turn(self, run_id: str, turn: Turn) -> float | None:
        run = self._runs.get(run_id)
        state = None if run is None else _to_scrub(run)
        if run is None or state is None:
            self._left_out.pop(run_id, None)
            self._verdicts.pop(run_id, None)
            return None
        self._verdicts[run_id] = run.verdicts
        if run.state != "guarded":
            return _SOONEST_SCRUB
        return self._guarded(run, lambda: self._scrub(run, state, turn))

    def _scrub(self, run: WatchedRun, state: ScrubState, turn: Turn) -> float:
        """Read what is due. Returns the seconds until the next check."""
        left_out, every = self._left_out[run.run_id], state.every
        for where in [where for where, until in left_out.items() if time.monotonic() >= until]:
            del left_out[where]
        reading = False

        def begin(due: Due) -> None:
            # Until the result is known, so that an unreadable place is not read over and over.
            nonlocal reading
            reading = True
            left_out[due.where] = time.monotonic() + min(_AGAIN, every)
            run.note_scrub(msgspec.structs.replace(state, reading=_place_of(due, None)))

        def end(done: Reread | None) -> None:
            nonlocal state, reading
            reading = False
            if done is None:
                run.note_scrub(state)
                return
            run.look_soon()  # nobody watches the records of readings and MD5s
            found = PlaceAt(path=done.path, id=done.id, place=done.place, at=time.time())
            state = msgspec.structs.replace(state, last=found)
            run.note_scrub(state)
            log("scrubbed", run=run.url, **fields(done, findings=[]))

        def verify(checkpoint: Checkpoint) -> None:
            run.ask(checkpoint.path)
            self._wake(run.run_id)

        yielded = False

        def hold() -> None:
            nonlocal yielded
            while self._urgent(run.run_id) and not self._stop.is_set():
                self._stop.wait(_TICK)
            yielded = yielded or (not reading and not turn.may_begin(1))
            if yielded or self._stop.is_set():
                raise ReadingStopped

        done = scrub(
            run.look(),
            ScrubOrder(max_age=every, leave_out=dict(left_out), late_md5s=_takes_late_md5s(run)),
            hold=hold,
            watcher=ScrubListener(verify=verify, tell=run.hooks.tell, begin=begin, end=end, source="daemon"),
            work=Work(rate=self._rate(run.storage, run.settings.scrub_rate)),
        )
        for sentence in () if run.was_removed() else done.could_not_tell:
            log("could_not_tell", level="warning", run=run.url, reason=sentence)
        if any(one.place == "kept" and one.outcome.value == "bad" for one in done.places):
            run.repair_soon()
            self._wake(run.run_id)
        if self._stop.is_set():
            return _LATEST_SCRUB
        run.note_scrub(_state_after(state, done, every))
        if yielded:
            return 0.0
        wait = (done.next.last or 0.0) + every - time.time() if done.next is not None else _LATEST_SCRUB
        return max(min(wait, _LATEST_SCRUB), min(_SOONEST_SCRUB, every))


def _takes_late_md5s(run: WatchedRun) -> bool:
    """True if saves are read only to take their MD5. On an object store that costs money: there the scrub takes it."""
    return run.settings.digest != "blake3" and os.path.isabs(run.url)


def _to_scrub(run: WatchedRun) -> ScrubState | None:
    """Return how a run is scrubbed: never for its age, if only MD5s are missing. None if nothing is read."""
    if run.scrub is None and _takes_late_md5s(run):
        return ScrubState(every=math.inf, rate=run.settings.scrub_rate)
    return run.scrub


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
