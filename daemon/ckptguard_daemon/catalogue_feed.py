"""What each pass tells the catalogue. It asks no storage about an unchanged run, and never fails."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.catalogue.look import RunLook, digest_of
from ckptguard.catalogue.observe import observe
from ckptguard.catalogue.rows import Event, Noted, event_key
from ckptguard.decisions.fleet_health import Activity, going_on, stopped_saving
from ckptguard.decisions.growth import full_in, unless_room
from ckptguard.decisions.run_summary import in_state
from ckptguard.decisions.time_to_decision import new_decisions
from ckptguard.engine.watched_run import Passed, WatchedRun
from ckptguard.errors import CkptguardError, NotFoundError
from ckptguard.records.leases import TrainingRecord, list_trainings
from ckptguard.records.run import record_names
from ckptguard.records.samples import FOLDER as SAMPLES
from ckptguard.records.who_and_when import has_ended, is_here, seconds_of
from ckptguard.replicas.replicate import Replica, furthest_behind
from ckptguard.runs.free_space import SHARED, file_system_of, free_space
from ckptguard.runs.run_reader import RunMemory
from ckptguard.runs.run_view import Listing, RunView
from ckptguard.runs.trainer_log import find_logs, logged_at
from ckptguard.storage.runtime_folder import private_runtime_folder
from ckptguard.upkeep.samples import PassStart
from ckptguard.values.ids import CheckpointId, escape
from ckptguard.values.run_rows import FilesInPlace, WaitingSave
from ckptguard.values.run_summary import RunSummary
from ckptguard_daemon.log import log

_NOTHING = RunSummary(url="", name="")
_LOOKS = 2  # passes in which a log that lives has grown


class SignsOfLife:
    """What shows that a training goes on, whether it saves or not: its log, its curve, and the process of its guard. A
    pass looks for them; any thread may ask."""

    def __init__(self) -> None:
        self._listing: Listing | None = None
        self._listed: bytes | None = None
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
        if start.listed != self._listed:  # records came or went
            self._listed = start.listed
            guards = list_trainings(view.run) if start.has_trainings else ()
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


@dataclass
class _OfRun:
    """What the feed remembers of one run."""

    start: PassStart | None = None  # what the last pass that was noted started from
    replicas: tuple[Replica, ...] = ()
    troubled: bool = False
    was_gone: bool = False  # its records may be others now, of the same names
    failures: int = 0  # of notes, since the last one that was made
    signs: SignsOfLife = field(default_factory=SignsOfLife)
    free: int | None = None  # bytes where its checkpoints are, and the name of that file system
    file_system: str = ""


def open_catalogue(environ: Mapping[str, str]) -> Catalogue:
    """Open the catalogue in this user's private folder; without such a folder it is in memory."""
    try:
        folder = private_runtime_folder(environ)
    except OSError as error:
        log("catalogue", level="warning", reason=f"there is no folder for the catalogue: {error}")
        return Catalogue()
    return Catalogue(folder, lambda reason: log("catalogue", level="warning", reason=reason))


class CatalogueFeed:
    """Notes runs in a catalogue, and remembers the summary of each. Any thread may call it."""

    def __init__(self, catalogue: Catalogue | None = None) -> None:
        self.catalogue = Catalogue() if catalogue is None else catalogue
        self._runs: dict[str, _OfRun] = {}
        self._listeners: list[Callable[[], None]] = []
        self.catalogue.after_write = self.wake

    def note(self, view: RunView, passed: Passed) -> None:
        """Note what a pass over a run has seen. Never raises. A failure is told if the next pass meets one, too: files
        go while they are read, and so do runs."""
        known = self._of(view.run.run_id)
        try:
            self._note(view, passed, known)
            known.failures = 0
        except NotFoundError:
            known.start = None  # the next pass says that the run is gone
        except Exception as error:
            known.start = None  # the next pass tries again
            known.failures += 1
            is_ours = isinstance(error, CkptguardError)
            if known.failures == (2 if is_ours else 1):
                reason = error.message if isinstance(error, CkptguardError) else type(error).__name__
                log("not_catalogued", level="warning", trace=not is_ours, run=view.run.url, reason=reason)

    def listen(self, wake: Callable[[], None]) -> None:
        """Have a function called whenever there may be new events, from any thread. It must not raise."""
        self._listeners.append(wake)

    def wake(self) -> None:
        """Call those who listen."""
        for wake in self._listeners:
            wake()

    def holds(self, run_id: str) -> bool:
        """True if something is noted of a run."""
        return bool(self.catalogue.digest(run_id))

    def gone(self, run_id: str) -> None:
        """Believe nothing that is noted of a run when it is there again."""
        self._of(run_id).was_gone = True

    def memory(self, run_id: str) -> RunMemory:
        """Return what the records of a run said: with a file beside the catalogue's, so that a restart reads little."""
        return RunMemory(self.catalogue.path_for(run_id, "memo"), run_id)

    def keep_only(self, run_ids: Iterable[str]) -> None:
        """Forget all other runs. Call it when all guarded runs are known, and whenever one may have gone."""
        wanted = frozenset(run_ids)
        for run_id in [id for id in list(self._runs) if id not in wanted]:
            went = self._runs.pop(run_id, None)
            if went is not None:
                SHARED.note_growth(went.file_system, run_id, 0.0)
        self.catalogue.keep_only(wanted)

    def summary(self, watched: WatchedRun) -> RunSummary:
        """Return the summary of a guarded run as of now."""
        noted = self.catalogue.summary(watched.run_id) or _NOTHING
        known = msgspec.structs.replace(noted, url=watched.url, name=watched.name, labels=dict(watched.settings.labels))
        trouble = None if watched.trouble is None else watched.trouble.message
        ended = watched.ended_words if watched.state == "ended" else None
        is_found = noted is not _NOTHING and trouble is None  # maybe by its first pass, which goes on
        state, now = "guarded" if is_found else watched.state, time.time()
        of_run = self._of(watched.run_id)
        stopped = of_run.signs.saving_stopped(known, now) if state == "guarded" and ended is None else None
        own = watched.settings.retention().keep_bytes
        left = [] if own is None else [own - sum(known.bytes.values())]
        left += [] if watched.shared is None else [watched.shared.left]
        grows = unless_room(known.growth if ended is None else None, of_run.free, min(left, default=None))
        together = SHARED.note_growth(of_run.file_system, watched.run_id, grows or 0.0)
        known = msgspec.structs.replace(known, free=of_run.free, full_in=full_in(of_run.free, grows, together))
        return in_state(known, now, state, trouble, ended, stopped)

    def _of(self, run_id: str) -> _OfRun:
        return self._runs.setdefault(run_id, _OfRun())

    def _note(self, view: RunView, passed: Passed, known: _OfRun) -> None:
        run, start = view.run, passed.notes.start
        if start is None:
            return
        before, held = known.start, self.catalogue.digest(run.run_id)
        known.signs.look(view, start, self.catalogue.summary(run.run_id))
        anew = passed.wrote or known.was_gone or (before is not None and known.troubled != passed.troubled)
        same = before is not None and (before, before.beside, known.replicas) == (start, start.beside, passed.replicas)
        if same and held and not anew:
            return
        names = frozenset(record_names(run, "") if passed.wrote else (*start.names, *start.beside))
        look = _look_of(view, passed, start, names)
        if anew or digest_of(look) != held:
            self._see(view, look, known)
        if before is not None:
            self._tell_of_replicas(run.run_id, known.replicas, passed.replicas)
        known.start, known.replicas, known.troubled = start, passed.replicas, passed.troubled

    def _see(self, view: RunView, look: RunLook, known: _OfRun) -> None:
        run = view.run
        if run.storage.root is not None:  # elsewhere it may cost a request
            known.free, known.file_system = free_space(run.storage), file_system_of(run.storage)
        before = self.catalogue.noted(run.run_id)
        noted = before or Noted()
        seen = observe(run, look, now=time.time(), known=Noted(events=noted.events) if known.was_gone else noted)
        if os.path.isabs(run.url) and not os.path.isdir(run.url):
            # It went while it was looked at: the rows of nothing must not replace what is known.
            raise NotFoundError(f"{run.url} went meanwhile")
        self.catalogue.see(seen)
        if before is not None and not known.was_gone:  # else nobody knows which of them are new
            for one in new_decisions(before.incidents, seen.incidents, seen.generations):
                log("decided", run=run.url, **msgspec.structs.asdict(one))
        known.was_gone = False

    def _tell_of_replicas(self, run_id: str, before: Sequence[Replica], after: Sequence[Replica]) -> None:
        troubles, now = {replica.url: replica.trouble for replica in before}, time.time()
        for replica in after:
            if troubles.get(replica.url) != replica.trouble and (replica.url in troubles or replica.trouble):
                cause, text = ("trouble", escape(replica.trouble)) if replica.trouble else ("recovered", "")
                key = event_key("replica", replica.url, repr(now))
                event = Event(key=key, kind="replica", at=now, about=escape(replica.url), cause=cause, text=text)
                self.catalogue.happened(run_id, event)


def _look_of(view: RunView, passed: Passed, start: PassStart, names: frozenset[str]) -> RunLook:
    places: dict[CheckpointId, FilesInPlace] = {}
    waiting: list[WaitingSave] = []
    unread = start.listing.not_understood
    for path, checkpoint in start.listing.checkpoints.items():
        sample = passed.notes.samples.get(path)
        if checkpoint.unread is not None:
            id = view.current_if_readable(checkpoint)
            if id is None:
                waiting.append(WaitingSave(checkpoint.series, 0, None))
            else:
                places[id] = FilesInPlace(0, unread=True)
            continue
        if sample is None or (sample.done and sample.id is None):
            continue
        written = checkpoint.written_at / 1e9 if checkpoint.written_at else None
        if sample.id is not None:
            places[sample.id] = FilesInPlace(checkpoint.bytes, written)
            continue
        since = time.time() - (time.monotonic() - sample.since)
        waiting.append(
            WaitingSave(checkpoint.series, checkpoint.bytes, written, since, sample.is_unfinished and not sample.judged)
        )
    return RunLook(
        url=view.run.url,
        names=names,
        places=places,
        waiting=tuple(waiting),
        replicas=len(view.settings.replicas),
        behind=furthest_behind(passed.replicas),
        replicated=Counter(id for replica in passed.replicas for id in replica.held),
        scrub_interval=passed.scrub_interval,
        keep=view.settings.keep,
        takes_md5=view.settings.digest != "blake3",
        logs=find_logs(start.listing.entries),
        paths=frozenset(map(escape, start.listing.checkpoints)),
        not_understood=0 if unread is None else unread.files,
        unread=len(start.listing.unread),
    )
