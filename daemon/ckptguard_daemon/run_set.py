"""The runs that the daemon guards, and the search that keeps them equal to its plan: runs of a fleet come and go, and
the plan may be read again."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from ckptguard.catalogue.catalogue import Catalogue, KnownRun
from ckptguard.engine.watched_run import WatchedRun
from ckptguard.errors import CkptguardError, SettingsError
from ckptguard.fleet import Discovery, Fleet, FleetRun, PlaceState
from ckptguard.runs.ended import SHOWN
from ckptguard.storage.failures import machine_trouble
from ckptguard.upkeep.budget import SharedBudget
from ckptguard.values.byte_sizes import parse_size
from ckptguard.values.ids import name_of_run
from ckptguard_daemon.log import log
from ckptguard_daemon.plan import DaemonPlan, Reload

_GAP = 0.5  # seconds between two searches, however much changes
_TIMEOUT = 2.0  # seconds for all places of a fleet: what was found elsewhere is guarded then
_GONE_INTERVALS = 2  # of `scan_interval`: after so long without its folder, a run of a fleet is guarded no longer


class RunSet:
    """The guarded runs in the order in which they came. Any thread may read or change it.

    Iterating shows the runs of one moment. A run that was removed meanwhile is still safe to use.
    """

    def __init__(self, runs: Iterable[WatchedRun] = ()) -> None:
        self._runs = {run.run_id: run for run in runs}

    def __iter__(self) -> Iterator[WatchedRun]:
        return iter(list(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, run_id: str) -> WatchedRun | None:
        """Return the run with this id, or None."""
        return self._runs.get(run_id)

    def add(self, run: WatchedRun) -> None:
        """Guard a run from now on. One with the same id is replaced."""
        self._runs[run.run_id] = run

    def remove(self, run_id: str) -> WatchedRun | None:
        """Guard a run no longer. Returns it, or None if it was not there."""
        return self._runs.pop(run_id, None)


class RunDiscovery:
    """Finds the runs of the plan, first of all those that are named. `make` makes a run to guard, and `change` gives
    one its name and its settings.

    What the `catalogue` remembers of an earlier process is guarded from the start, so that a run is shown while nobody
    can look at its place, too. `arrived` and `left` are called for each run that comes and goes, and `looked` after
    each search. All are called in the thread that searches.
    """

    def __init__(
        self,
        plan: DaemonPlan,
        runs: RunSet,
        make: Callable[[FleetRun], WatchedRun],
        change: Callable[[WatchedRun, FleetRun], None],
        *,
        arrived: Callable[[WatchedRun], None] = lambda run: None,
        left: Callable[[WatchedRun], None] = lambda run: None,
        looked: Callable[[], None] = lambda: None,
        catalogue: Catalogue | None = None,
    ) -> None:
        self.plan, self._runs, self._make, self._change = plan, runs, make, change
        self._arrived, self._left, self._looked = arrived, left, looked
        self._wake = threading.Event()
        self._discovery = None if plan.fleet is None else Discovery(plan.fleet, self.wake)
        self._shared = _shared_budget(plan)
        self._missing: dict[str, float] = {}  # run id -> since when, monotonic
        self._reported: set[str] = set()
        self.has_looked = False
        self._catalogue = Catalogue() if catalogue is None else catalogue
        self._known = self._catalogue.remembered_runs(self._plan_name)
        self._take(Fleet(runs=tuple(self._known_runs())))

    @property
    def folders(self) -> list[str]:
        """The local folders in which a new run would be seen."""
        return [] if self._discovery is None else self._discovery.folders

    @property
    def troubles(self) -> list[str]:
        """What could not be searched last."""
        return sorted(self._reported)

    @property
    def places(self) -> list[PlaceState]:
        """How the search of each place of the fleet goes."""
        return [] if self._discovery is None else self._discovery.places

    def wake(self) -> None:
        """Search soon."""
        self._wake.set()

    def run(self, stop: threading.Event, reload: Reload | None = None) -> None:
        """Search until `stop` is set. Call `wake` after that to end it quickly."""
        while not stop.is_set():
            self._wake.clear()
            if reload is not None and reload.asked.is_set():
                reload.asked.clear()
                self.reload(reload.read)
            self.look(_TIMEOUT)
            if stop.wait(_GAP):
                return
            self._wake.wait(self.plan.settings.scan_interval)

    def look(self, timeout: float | None = None) -> None:
        """Search once, and bring the runs up to date. What takes longer than `timeout` seconds goes on, and then
        wakes. Never raises."""
        try:
            fleet = Fleet() if self._discovery is None else self._discovery.find(timeout)
            self._tell(fleet.troubles)
            self._forget_ended()
            self._let_go(self._take(fleet), certain=not fleet.troubles and not fleet.searching)
            self.has_looked = self.has_looked or not fleet.searching
            self._remember()
            self._looked()
        except Exception as error:
            reported = machine_trouble(error)
            log("fleet_not_searched", level="error", trace=reported is None, reason=str(reported or error))

    def reload(self, read_again: Callable[[], DaemonPlan]) -> None:
        """Read the plan again. A wrong one is told, and the plan stays as it is."""
        try:
            plan = read_again()
        except Exception as error:
            reported = error if isinstance(error, CkptguardError) else machine_trouble(error)
            log("plan_not_reloaded", level="error", trace=reported is None, reason=str(reported or error))
            return
        self.plan = plan
        self._discovery = None if plan.fleet is None else Discovery(plan.fleet, self.wake)
        self._shared = _shared_budget(plan)
        self._reported = set()
        self._known = []  # under the name of this plan nothing is remembered yet
        log("plan_reloaded")

    def _take(self, fleet: Fleet) -> list[WatchedRun]:
        """Guard the named runs and those of the fleet, with their settings. Returns those that are neither."""
        wanted = {url: FleetRun(url=url, name=name_of_run(url), settings=self.plan.settings) for url in self.plan.urls}
        wanted |= {run.url: run for run in fleet.runs}
        known = {run.url: run for run in self._runs}
        in_fleet = {run.url for run in fleet.runs}
        for url, one in wanted.items():
            run = known.get(url)
            if run is not None:
                run.shared = self._shared if url in in_fleet else None
                self._change(run, one)
                continue
            run = self._make(one)
            run.shared = self._shared if url in in_fleet else None
            run.was_found = url not in self.plan.urls
            run.was_on = next((one.was_on for one in self._known if one.url == url), None)
            self._change(run, one)
            self._runs.add(run)
            self._arrived(run)
        return [run for url, run in known.items() if url not in wanted]

    def _forget_ended(self) -> None:
        """Search no more for runs of a fleet that ended a day ago, until somebody saves there again."""
        for run in self._runs:
            ended = run.state == "ended" and run.ended_at is not None and time.time() - run.ended_at > SHOWN
            if ended and self._discovery is not None:
                self._discovery.forget(run.url)

    def _let_go(self, missing: list[WatchedRun], *, certain: bool) -> None:
        """Guard runs no longer that are missing for some time. Unless that is `certain`, their folders must be gone."""
        now, before = time.monotonic(), self._missing
        looked_at = [run for run in missing if run.passes or run.trouble is not None or run.state == "ended"]
        missing = [run for run in looked_at if not run.is_away]  # a mount that is away is no removal
        gone = [run for run in missing if certain or run.state in ("waiting", "ended")]
        self._missing = {run.run_id: before.get(run.run_id, now) for run in gone}
        for run in gone:
            if now - self._missing[run.run_id] >= _GONE_INTERVALS * self.plan.settings.scan_interval:
                del self._missing[run.run_id]
                self._runs.remove(run.run_id)
                if self._shared is not None:
                    self._shared.note(run.url, None)
                log("run_left", run=run.url)
                self._left(run)

    @property
    def _plan_name(self) -> str:
        return hashlib.sha256("\n".join(self.plan.places).encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def _known_runs(self) -> Iterator[FleetRun]:
        """Yield what an earlier process guarded."""
        for url, name, _ in self._known:
            if self.plan.fleet is not None and url not in self.plan.urls:
                with contextlib.suppress(SettingsError):  # the search tells of it
                    yield FleetRun(url=url, name=name, settings=self.plan.fleet.settings_of(name, url))

    def _remember(self) -> None:
        """Keep on disk which runs are guarded now."""
        known = [KnownRun(run.url, run.name, run.was_on) for run in self._runs]
        if known != self._known:
            self._known = known
            self._catalogue.remember_runs(self._plan_name, known)

    def _tell(self, troubles: tuple[str, ...]) -> None:
        for sentence in troubles:
            if sentence not in self._reported:
                log("fleet_trouble", level="warning", reason=sentence)
        self._reported = set(troubles)


def _shared_budget(plan: DaemonPlan) -> SharedBudget | None:
    total = plan.fleet.file.keep_bytes if plan.fleet is not None else None
    return None if total is None else SharedBudget(parse_size(total))
