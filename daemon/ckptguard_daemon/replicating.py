"""Replicating: one thread that brings the replicas up to date after verdicts, while the loop has nothing to do."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from ckptguard.documents.build import fields
from ckptguard.errors import CkptguardError, StoppedError
from ckptguard.incidents.notify import Hooks, replica_event
from ckptguard.replicas.replicate import Replica, replica_urls, replicate
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.scan.process.low_priority import lower_priority
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard_daemon.guarded import WatchedRun
from ckptguard_daemon.log import log

_LOWEST = 19
_TICK = 0.5  # seconds
_LATEST = 600.0  # seconds until a look without a new verdict: others write records, too
_LONGEST_PAUSE = 3600.0  # seconds until a replica in trouble is tried again


class _Place(msgspec.Struct, kw_only=True):
    """Notes about one replica. They only save work."""

    due: float = 0.0  # monotonic
    verdicts: int = -1  # of the run, when it was last brought up to date
    failures: int = 0
    arrived: set[CheckpointId] = msgspec.field(default_factory=set)


class Replicating:
    """Brings the replicas of the runs up to date, in turn. `idle` is set while the loop does nothing; a block is sent
    only then. A replica in trouble is told of once, and tried again after pauses that grow; nothing waits for it."""

    def __init__(
        self,
        runs: Sequence[WatchedRun],
        settings: Settings,
        hooks: Hooks,
        idle: threading.Event | None,
        wake: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self._runs = runs if settings.replicas else []
        self._settings = settings
        self._hooks = hooks
        self._idle = idle
        self._wake = wake
        self._stop = stop
        self._places: dict[tuple[str, str], _Place] = {}

    def start(self) -> threading.Thread | None:
        """Begin, if there are replicas."""
        if not self._runs:
            return None
        thread = threading.Thread(target=self._run, name="replicate", daemon=True)
        thread.start()
        return thread

    def once(self) -> None:
        """Bring every replica that is due up to date, now."""
        for run in self._runs:
            if run.state == "guarded" and run.passes and not self._stop.is_set():
                try:
                    self._bring_up_to_date(run)
                except CkptguardError as error:
                    log("not_replicated", level="warning", run=run.url, reason=error.message)
                except Exception as error:
                    log("not_replicated", level="error", trace=True, run=run.url, reason=type(error).__name__)

    def _run(self) -> None:
        if self._settings.niceness and sys.platform == "linux":
            with contextlib.suppress(OSError):
                lower_priority(_LOWEST)
        while not self._stop.wait(_TICK):
            self.once()

    def _bring_up_to_date(self, guarded: WatchedRun) -> None:
        verdicts, now = guarded.verdicts, time.monotonic()
        for url in self._urls(guarded):
            place = self._places.setdefault((guarded.run_id, url), _Place())
            news = place.verdicts != verdicts and not place.failures
            if (now < place.due and not news) or self._stop.is_set():
                continue
            view = guarded.look()  # anew for each replica: one may take hours
            place.due = time.monotonic() + _LATEST  # also if it raises
            done = self._replicate(view, url, place)
            if self._stop.is_set():
                return
            place.verdicts = verdicts
            self._tell(guarded, view, place, done)

    def _urls(self, guarded: WatchedRun) -> tuple[str, ...]:
        return replica_urls(guarded.url, self._settings)

    def _replicate(self, view: RunView, url: str, place: _Place) -> Replica:
        work = Work(rate=self._settings.replica_rate, stop=self._stop)
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
                guarded.ask(one.path)  # the loop tells of what is bad
                self._wake(guarded.run_id)
        if done.trouble is None:
            if place.failures:
                log("replica_recovered", run=guarded.url, replica=url)
            place.failures = 0
            return
        place.failures += 1
        pause = min(self._settings.scan_interval * 2.0 ** min(place.failures, 12), _LONGEST_PAUSE)
        place.due = time.monotonic() + pause
        if place.failures == 1:
            log("replica_in_trouble", level="warning", run=guarded.url, replica=url, reason=done.trouble)
            self._hooks.tell(replica_event(view.run, url, done.trouble, source="daemon"))

    def _hold(self) -> None:
        while self._idle is not None and not self._idle.wait(_TICK):
            if self._stop.is_set():
                raise StoppedError("replication was called off", key="")
