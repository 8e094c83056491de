"""What shows that a training goes on, whether it saves or not: its log, its curve, and the process of its guard."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ckptguard.decisions.fleet_health import Activity, going_on, stopped_saving
from ckptguard.records.leases import TRAININGS, TrainingRecord, list_trainings
from ckptguard.records.samples import FOLDER as SAMPLES
from ckptguard.records.who_and_when import has_ended, is_here, seconds_of
from ckptguard.runs.run_view import Listing, RunView
from ckptguard.runs.trainer_log import logged_at
from ckptguard.upkeep.samples import PassStart
from ckptguard.values.run_summary import RunSummary

_LOOKS = 2  # passes in which a log that lives has grown


class SignsOfLife:
    """The signs of one run. A pass looks for them; any thread may ask."""

    def __init__(self) -> None:
        self._listing: Listing | None = None
        self._listed: Sequence[str] | None = None
        self._samples: frozenset[str] | None = None
        self._logged: Activity | None = None
        self._guards: tuple[TrainingRecord, ...] = ()
        self._shortest = 0.0  # seconds: what is shorter than that is not seen

    def look(self, view: RunView, start: PassStart, summary: RunSummary | None) -> None:
        """See what a pass has listed. Of a run on an object store nobody knows: its looks are too rare."""
        if not os.path.isabs(view.run.url):
            return
        self._shortest = _LOOKS * view.settings.scan_interval
        interval = self._interval(summary) if summary is not None else None
        samples = frozenset(name for name in start.beside if name.startswith(f"{SAMPLES}/"))
        if self._samples is not None and samples - self._samples:
            self._logged = going_on(self._logged, time.time(), interval)
        if start.listing is not self._listing and (at := logged_at(start.listing.entries)) is not None:
            self._logged = going_on(self._logged, at, interval)
        self._samples, self._listing = samples, start.listing
        if start.listed is not self._listed:  # the same object while no record came or went
            self._listed = start.listed
            trains = any(name.startswith(f"{TRAININGS}/") for name in start.listed)
            guards = list_trainings(view.run) if trains else ()
            self._guards = tuple(one for one in guards if one.loops and is_here(one.owner))

    def saving_stopped(self, summary: RunSummary, now: float) -> bool | None:
        """True if training goes on and saves nothing any more. None: nothing shows whether it goes on."""
        return stopped_saving(now, summary.saved_at, self._interval(summary), self._known(now))

    def _interval(self, summary: RunSummary) -> float | None:
        return None if summary.save_interval is None else max(summary.save_interval, self._shortest)

    def _known(self, now: float) -> list[Activity]:
        guards = [one for one in self._guards if not has_ended(one.owner)]
        found = [Activity(since, now) for one in guards if (since := seconds_of(one.since)) is not None]
        return found if self._logged is None else [*found, self._logged]
