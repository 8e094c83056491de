"""Keep the roster equal to the plan: runs of a fleet that come and go, and a plan that is read again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import CkptguardError
from ckptguard.fleet import Discovery, Fleet, FleetRun
from ckptguard.runs.ended import SHOWN
from ckptguard.storage.failures import machine_trouble
from ckptguard.values.ids import name_of_run
from ckptguard_daemon.log import log
from ckptguard_daemon.plan import Again, Plan
from ckptguard_daemon.roster import Roster

_GAP = 0.5  # seconds between two searches, however much changes
_PATIENCE = 2.0  # seconds for all places of a fleet: what was found elsewhere is guarded then
_GONE_INTERVALS = 2  # of `scan_interval`: after so long without its folder, a run of a fleet is guarded no longer


class Following:
    """Finds the runs of the plan, first of all those that are named. `make` makes a run to guard, and `change` gives
    one its name and its settings.

    `arrived` and `left` are called for each run that comes and goes, and `looked` after each search. All are called in
    the thread that searches.
    """

    def __init__(
        self,
        plan: Plan,
        roster: Roster,
        make: Callable[[FleetRun], WatchedRun],
        change: Callable[[WatchedRun, FleetRun], None],
        *,
        arrived: Callable[[WatchedRun], None] = lambda run: None,
        left: Callable[[WatchedRun], None] = lambda run: None,
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan, self._roster, self._make, self._change = plan, roster, make, change
        self._arrived, self._left, self._looked = arrived, left, looked
        self._wake = threading.Event()
        self._discovery = None if plan.fleet is None else Discovery(plan.fleet, self.wake)
        self._missing: dict[str, float] = {}  # run id -> since when, monotonic
        self._told: set[str] = set()
        self.has_looked = False
        self._take(Fleet())

    @property
    def folders(self) -> list[str]:
        """The local folders in which a new run would be seen."""
        return [] if self._discovery is None else self._discovery.folders

    @property
    def troubles(self) -> list[str]:
        """What could not be searched last."""
        return sorted(self._told)

    def wake(self) -> None:
        """Search soon."""
        self._wake.set()

    def run(self, stop: threading.Event, again: Again | None = None) -> None:
        """Search until `stop` is set. Call `wake` after that to end it quickly."""
        while not stop.is_set():
            self._wake.clear()
            if again is not None and again.asked.is_set():
                again.asked.clear()
                self.reload(again.read)
            self.look(_PATIENCE)
            if stop.wait(_GAP):
                return
            self._wake.wait(self.plan.settings.scan_interval)

    def look(self, patience: float | None = None) -> None:
        """Search once, and bring the roster up to date. What takes longer than `patience` seconds is searched on, and
        ends with a `wake`. Never raises."""
        try:
            fleet = Fleet() if self._discovery is None else self._discovery.find(patience)
            self._tell(fleet.troubles)
            self._forget_ended()
            self._let_go(self._take(fleet), certain=not fleet.troubles and not fleet.searching)
            self.has_looked = self.has_looked or not fleet.searching
            self._looked()
        except Exception as error:
            told = machine_trouble(error)
            log("fleet_not_searched", level="error", trace=told is None, reason=str(told or error))

    def reload(self, read_again: Callable[[], Plan]) -> None:
        """Read the plan again. A wrong one is told, and the plan stays as it is."""
        try:
            plan = read_again()
        except Exception as error:
            told = error if isinstance(error, CkptguardError) else machine_trouble(error)
            log("plan_not_reloaded", level="error", trace=told is None, reason=str(told or error))
            return
        self.plan = plan
        self._discovery = None if plan.fleet is None else Discovery(plan.fleet, self.wake)
        self._told = set()
        log("plan_reloaded")

    def _take(self, fleet: Fleet) -> list[WatchedRun]:
        """Guard the named runs and those of the fleet, with their settings. Returns those that are neither."""
        wanted = {url: FleetRun(url=url, name=name_of_run(url), settings=self.plan.settings) for url in self.plan.urls}
        wanted |= {run.url: run for run in fleet.runs}
        known = {run.url: run for run in self._roster}
        for url, one in wanted.items():
            run = known.get(url)
            if run is not None:
                self._change(run, one)
                continue
            run = self._make(one)
            run.was_found = url not in self.plan.urls
            self._change(run, one)
            self._roster.add(run)
            self._arrived(run)
        return [run for url, run in known.items() if url not in wanted]

    def _forget_ended(self) -> None:
        """Search no more for runs of a fleet that ended a day ago, until somebody saves there again."""
        for run in self._roster:
            ended = run.state == "ended" and run.ended_at is not None and time.time() - run.ended_at > SHOWN
            if ended and self._discovery is not None:
                self._discovery.forget(run.url)

    def _let_go(self, missing: list[WatchedRun], *, certain: bool) -> None:
        """Guard runs no longer that are missing for some time. Unless that is `certain`, their folders must be gone."""
        now, before = time.monotonic(), self._missing
        missing = [run for run in missing if not run.is_away]  # a mount that is away is no removal
        gone = [run for run in missing if certain or run.state in ("waiting", "ended")]
        self._missing = {run.run_id: before.get(run.run_id, now) for run in gone}
        for run in gone:
            if now - self._missing[run.run_id] >= _GONE_INTERVALS * self.plan.settings.scan_interval:
                del self._missing[run.run_id]
                self._roster.remove(run.run_id)
                log("run_left", run=run.url)
                self._left(run)

    def _tell(self, troubles: tuple[str, ...]) -> None:
        for sentence in troubles:
            if sentence not in self._told:
                log("fleet_trouble", level="warning", reason=sentence)
        self._told = set(troubles)
