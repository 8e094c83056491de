"""What each pass tells the catalogue. It asks no storage about an unchanged run, and never fails."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ckptguard.catalogue.catalogue import Catalogue
from ckptguard.catalogue.look import RunLook, digest_of
from ckptguard.catalogue.observe import observe
from ckptguard.catalogue.questions import (
    EventPage,
    Timeline,
    action_keys,
    curve,
    curve_identity,
    events_after,
    known_rows,
    summaries,
    timeline,
)
from ckptguard.catalogue.rows import CurveRow, Event, RunSeen, event_key
from ckptguard.decisions.run_summary import in_state
from ckptguard.errors import CkptguardError, NotFoundError
from ckptguard.records.run import record_names
from ckptguard.replicas.replicate import Replica, furthest_behind
from ckptguard.runs.run_view import RunView
from ckptguard.runs.trainer_log import find_logs
from ckptguard.storage.runtime_folder import private_runtime_folder
from ckptguard.upkeep.reconcile import PassNotes
from ckptguard.upkeep.samples import Start
from ckptguard.values.ids import CheckpointId, escape, short_digest
from ckptguard.values.run_rows import IncidentRow, Place, WaitingSave
from ckptguard.values.run_summary import RunSummary
from ckptguard_daemon.event_log import EventLog
from ckptguard_daemon.log import log

if TYPE_CHECKING:
    from ckptguard_daemon.guarded import WatchedRun


class Passed(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's pass knows. `wrote`: it may have written records since it began. `troubled`: it could not do
    everything."""

    notes: PassNotes
    replicas: tuple[Replica, ...] = ()
    scrub_interval: float | None = None
    wrote: bool = False
    troubled: bool = False


class _Before(msgspec.Struct, frozen=True):
    start: Start
    replicas: tuple[Replica, ...]
    troubled: bool
    digest: bytes


def open_catalogue(socket_path: str, environ: Mapping[str, str]) -> Catalogue | None:
    """Open the catalogue of the daemon at this socket, in this user's private folder. None if there is no such
    folder."""
    name = short_digest(socket_path)
    try:
        folder = private_runtime_folder(environ)
    except OSError as error:
        log("catalogue", level="warning", reason=f"there is no folder for the catalogue: {error}")
        return None
    path = os.path.join(folder, f"{name}.catalogue")
    catalogue = Catalogue(path, lambda reason: log("catalogue", level="warning", reason=reason))
    catalogue.start()
    return catalogue


class CatalogueFeed:
    """Notes runs in a catalogue, if there is one, and remembers the summary of each. Any thread may call it."""

    def __init__(self, catalogue: Catalogue | None) -> None:
        self._catalogue = catalogue
        self._before: dict[str, _Before] = {}
        self._rows: dict[str, RunSeen] = {}  # of the runs that no catalogue holds
        self._failed: set[str] = set()
        self._was_gone: set[str] = set()  # whose records may be others now, of the same names
        self._wanted: frozenset[str] | None = None
        self._unwritten = EventLog()  # of the runs that no catalogue holds
        self._listeners: list[Callable[[], None]] = []
        if catalogue is not None:
            catalogue.after_write = self.wake
        self._summaries = (catalogue.ask(summaries) if catalogue is not None else None) or {}

    def note(self, view: RunView, passed: Passed) -> None:
        """Note what a pass over a run has seen. Never raises."""
        run_id = view.run.run_id
        try:
            self._note(view, passed)
            self._failed.discard(run_id)
        except NotFoundError:
            self._before.pop(run_id, None)  # the next pass says that the run is gone
        except Exception as error:
            self._before.pop(run_id, None)  # the next pass tries again
            if run_id not in self._failed:
                self._failed.add(run_id)
                told = isinstance(error, CkptguardError)
                reason = error.message if isinstance(error, CkptguardError) else type(error).__name__
                log("not_catalogued", level="warning", trace=not told, run=view.run.url, reason=reason)

    @property
    def has_catalogue(self) -> bool:
        """True if a catalogue holds the runs now."""
        return self._catalogue is not None and self._catalogue.is_usable

    def listen(self, wake: Callable[[], None]) -> None:
        """Have a function called whenever there may be new events, from any thread. It must not raise."""
        self._listeners.append(wake)

    def wake(self) -> None:
        """Call those who listen."""
        for wake in self._listeners:
            wake()

    def holds(self, run_id: str) -> bool:
        """True if all of a run is noted, and what was noted is still there."""
        return bool(self._digest(run_id))

    def rows(self, run_id: str) -> Timeline | None:
        """Return what is noted of a run. None: nothing yet, or its catalogue is being made anew."""
        if self._catalogue is not None:
            line = self._catalogue.ask(timeline, run_id)
            if line is not None:
                return line
        seen = self._rows.get(run_id)
        if seen is None:
            return None
        generations = tuple(sorted(seen.generations, key=lambda g: (g.saved_at or 0.0, g.name)))
        return Timeline(generations=generations, incidents=seen.incidents, events=self._unwritten.of(run_id))

    def curve(self, run_id: str) -> tuple[CurveRow, tuple[IncidentRow, ...]]:
        """Return the curve of a run, and its incidents. Nothing while its catalogue is being made anew."""
        found = self._catalogue.ask(curve, run_id) if self._catalogue is not None else None
        seen = self._rows.get(run_id)
        if seen is None:
            return found or (CurveRow(), ())
        return seen.curve or CurveRow(), seen.incidents

    def events_after(self, number: int, *, most: int) -> EventPage | None:
        """Return the events after a number. None: the catalogue is being made anew."""
        if self._catalogue is None:
            return self._unwritten.after(number, most=most)
        return self._catalogue.ask(events_after, number, most=most)

    def gone(self, run_id: str) -> None:
        """Believe nothing that is noted of a run when it is there again."""
        self._was_gone.add(run_id)

    def close(self) -> None:
        """Write what waits, and end."""
        if self._catalogue is not None:
            self._catalogue.close()

    def keep_only(self, run_ids: Iterable[str]) -> None:
        """Forget all other runs. Call it when all guarded runs are known, and whenever one may have gone."""
        wanted = frozenset(run_ids)
        if wanted == self._wanted:
            return
        self._wanted = wanted
        for known in (self._before, self._rows, self._summaries):
            for run_id in [id for id in list(known) if id not in wanted]:
                known.pop(run_id, None)
        if self._catalogue is not None:
            self._catalogue.keep_only(wanted)

    def summary(self, watched: WatchedRun) -> RunSummary:
        """Return the summary of a guarded run as of now."""
        known = self._summaries.get(watched.run_id, RunSummary(url="", name=""))
        known = msgspec.structs.replace(known, url=watched.url, name=watched.name)
        trouble = None if watched.trouble is None else watched.trouble.message
        ended = watched.ended_words if watched.state == "ended" else None
        return in_state(known, time.time(), watched.state, trouble, ended)

    def _note(self, view: RunView, passed: Passed) -> None:
        run, start = view.run, passed.notes.start
        if start is None:
            return
        before, held = self._before.get(run.run_id), self._digest(run.run_id)
        anew = passed.wrote or run.run_id in self._was_gone
        anew = anew or (before is not None and before.troubled != passed.troubled)
        same = before is not None and (before.start, before.start.beside, before.replicas, before.digest) == (
            start,
            start.beside,
            passed.replicas,
            held,
        )
        if same and held and not anew:
            return
        names = frozenset(record_names(run, "")) if passed.wrote else start.names | start.beside
        look = _look_of(view, passed, start, names)
        digest = digest_of(look)
        if anew or digest != held:
            seen = self._see(view, look)
            digest = seen.digest
        if before is not None:
            self._tell_of_replicas(run.run_id, before.replicas, passed.replicas)
        self._before[run.run_id] = _Before(start, passed.replicas, passed.troubled, digest)

    def _digest(self, run_id: str) -> bytes:
        if self._catalogue is not None and self._catalogue.is_usable:
            return self._catalogue.digest(run_id)
        seen = self._rows.get(run_id)
        return b"" if seen is None else seen.digest

    def _see(self, view: RunView, look: RunLook) -> RunSeen:
        run_id = view.run.run_id
        known = self._catalogue.ask(known_rows, run_id) if self._catalogue is not None else None
        rows = self._rows.get(run_id)
        if known is None or not known[0]:
            known = known or (b"", {}, {})
            if rows is not None and not self.has_catalogue:  # a new catalogue holds every event, also those before it
                known = (b"", {g.name: g for g in rows.generations}, {i.name: i for i in rows.incidents})
        drawn = rows.curve if rows is not None else None
        drawn_from = drawn.identity if drawn is not None else None
        if self.has_catalogue and self._catalogue is not None:
            drawn_from = self._catalogue.ask(curve_identity, run_id)
        told = self._catalogue.ask(action_keys, run_id) if self._catalogue is not None else None
        if run_id in self._was_gone:
            known, drawn_from = (b"", {}, {}), None
        seen = observe(
            view.run,
            look,
            now=time.time(),
            known=known[1],
            known_incidents=known[2],
            known_curve=drawn_from or "",
            known_actions={e.event.key for e in self._unwritten.of(run_id)} if told is None else told,
        )
        if os.path.isabs(view.run.url) and not os.path.isdir(view.run.url):
            # It went while it was looked at: the rows of nothing must not replace what is known.
            raise NotFoundError(f"{view.run.url} went meanwhile")
        self._was_gone.discard(run_id)
        self._summaries[run_id] = seen.summary
        if self._catalogue is not None and self._catalogue.is_usable:
            self._rows.pop(run_id, None)
            self._catalogue.see(seen)
        else:
            self._rows[run_id] = msgspec.structs.replace(seen, events=(), curve=seen.curve or drawn)
            self._unwritten.add(run_id, seen.events)
            self.wake()
        return seen

    def _tell_of_replicas(self, run_id: str, before: Sequence[Replica], after: Sequence[Replica]) -> None:
        if self._catalogue is None:
            return
        troubles, now = {replica.url: replica.trouble for replica in before}, time.time()
        for replica in after:
            if troubles.get(replica.url) != replica.trouble and (replica.url in troubles or replica.trouble):
                cause, text = ("trouble", escape(replica.trouble)) if replica.trouble else ("recovered", "")
                key = event_key("replica", replica.url, repr(now))
                event = Event(key=key, kind="replica", at=now, about=escape(replica.url), cause=cause, text=text)
                self._catalogue.happened(run_id, event)


def _look_of(view: RunView, passed: Passed, start: Start, names: frozenset[str]) -> RunLook:
    places: dict[CheckpointId, Place] = {}
    waiting: list[WaitingSave] = []
    for path, checkpoint in start.listing.checkpoints.items():
        sample = passed.notes.samples.get(path)
        if sample is None or (sample.done and sample.id is None):
            continue
        written = checkpoint.written_at / 1e9 if checkpoint.written_at else None
        if sample.id is not None:
            places[sample.id] = Place(checkpoint.bytes, written)
            continue
        since = time.time() - (time.monotonic() - sample.since)
        waiting.append(WaitingSave(checkpoint.series, checkpoint.bytes, written, since))
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
        logs=find_logs(start.listing.entries),
    )
