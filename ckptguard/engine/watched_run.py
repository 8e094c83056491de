"""One guarded run: what is known about it between passes. A restart rebuilds all of it."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from ckptguard.decisions.fleet_health import is_training, shortest_interval
from ckptguard.decisions.known_good import CurrentVerdict, verdict_name
from ckptguard.decisions.store_requests import next_pause
from ckptguard.engine.watcher import Watcher
from ckptguard.errors import CkptguardError, CouldNotTellError, NotFoundError, RunRemovedError
from ckptguard.layouts import Checkpoint
from ckptguard.records.daemon_record import KEY as DAEMON_KEY
from ckptguard.records.daemon_record import (
    DaemonRecord,
    answers,
    clear_daemon_record,
    read_daemon_record,
    surely_ended,
    write_daemon_record,
)
from ckptguard.records.incidents import read_incident
from ckptguard.records.ledger import FOLDER as LEDGER
from ckptguard.records.run import Run, has_records, open_listed, open_run
from ckptguard.records.samples import FOLDER as SAMPLES
from ckptguard.records.who_and_when import saved_at, utc_now
from ckptguard.replicas.replicate import Replica
from ckptguard.reporting.events import Known, known_outcomes, news_in, reason_of, unfinished_event, verdict_event
from ckptguard.reporting.notify import Hooks
from ckptguard.reporting.open_and_close import MissedIncidents, leave_report, record_bad_save
from ckptguard.runs.ended import REMOVED, ended_at, ended_words
from ckptguard.runs.find_known_good import find_known_good
from ckptguard.runs.results import Checked
from ckptguard.runs.run_reader import RunMemory
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.storage.failures import machine_trouble
from ckptguard.storage.local.mounts import mount_of
from ckptguard.storage.local.removal import (
    begin_again,
    is_missing,
    note_lasting,
    times_refused,
    was_lasting,
    were_removed,
)
from ckptguard.storage.remote.listed_storage import ListedRun
from ckptguard.upkeep.budget import SharedBudget
from ckptguard.upkeep.reconcile import PassNotes, PassResult, PendingSave, pass_read_only, reconcile, start_of
from ckptguard.upkeep.samples import PassStart
from ckptguard.values.ids import RECORDS_FOLDER, CheckpointId, Step, name_of_run, numbers_of, series_folder
from ckptguard.values.record_formats import FORMAT_KEY
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint

_SOONEST = 0.2
_VERDICTS_SEEN = 1.0  # seconds until verdicts of another daemon are seen, of which nothing hints
_GOING = 2.0  # seconds without a change after which a run without records begins again
_LONGEST_BACKOFF = 600.0
_Identity = tuple[int, ...] | None  # None: there is none
_REFUSED_AT_MOST = 4  # passes over a run that seems to be going, until that is said
_DOUBLINGS = 30  # of the pause between tries: more than anybody has to wait through
_REMEMBERED = 1000
_ROOM_STAYS = 3600.0  # seconds without a lack of room, after which that is logged
_BETWEEN_REQUESTS = 2.0  # seconds in which other runs are asked once for room
_NOTING_SHARE = 20  # of the time of a pass, at most this part is spent on noting verdicts before its end


def storage_of(url: str) -> str:
    """Return what places have in common that may be slow together: host and bucket, or a local folder's mount."""
    if os.path.isabs(url):
        return f"mount {mount_of(url)[0]}"
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


class PlaceAt(msgspec.Struct, frozen=True, kw_only=True):
    """A place of a generation, and when it was read or will be read; `at` is in seconds since 1970."""

    path: str
    id: CheckpointId
    place: str
    at: float | None


class ScrubState(msgspec.Struct, frozen=True, kw_only=True):
    """What is being read, what was read last, and what is due next."""

    every: float
    rate: float | None
    reading: PlaceAt | None = None
    last: PlaceAt | None = None
    next: PlaceAt | None = None


def _scrub_state(url: str, settings: Settings) -> ScrubState | None:
    every = settings.scrub_seconds(local=os.path.isabs(url))
    return None if every is None else ScrubState(every=every, rate=settings.scrub_rate)


def _identity(path: str) -> _Identity:
    """Return what differs if another file or folder gets this name, or if a file gets other content."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_mode, 0 if stat.S_ISDIR(info.st_mode) else info.st_mtime_ns


class Passed(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's pass knows. `wrote`: it may have written records since it began. `troubled`: it could not do
    everything."""

    notes: PassNotes
    replicas: tuple[Replica, ...] = ()
    scrub_interval: float | None = None
    wrote: bool = False
    troubled: bool = False


class Feed(Protocol):
    """Who remembers what passes have seen, for questions about many runs. It never raises."""

    def note(self, view: RunView, passed: Passed) -> None:
        """Note what a pass has seen."""

    def holds(self, run_id: str) -> bool:
        """True if something is noted of a run."""

    def gone(self, run_id: str) -> None:
        """Believe nothing that is noted of a run when it is there again."""

    def memory(self, run_id: str) -> RunMemory:
        """Return what the records of a run said when they were read last, maybe by an earlier process."""


class WatchedRun:
    """Makes passes over one run. Only one thread at a time calls `step`; others may read its attributes, and open
    it. What happens is logged where the hooks log."""

    def __init__(
        self,
        url: str,
        run_id: str,
        settings: Settings,
        hooks: Hooks,
        presence: DaemonRecord | None,
        feed: Feed | None = None,
        *,
        source: str = "daemon",
        caller_acts: bool = False,
    ) -> None:
        """`caller_acts`: the caller does something about bad saves, and records it. Then no incident is opened here,
        and nothing is written before the first save."""
        self.url, self.run_id, self.settings = url, run_id, settings
        self.name = name_of_run(url)  # a fleet may have another name for it
        self.shared: SharedBudget | None = None  # of the fleet that it is of
        self.was_found = False  # by a search in a fleet; nobody named it
        self.storage = storage_of(url)  # equal for runs that may be slow together
        self.run: Run | None = None
        self._store: ListedRun | None = None  # of a run on an object store
        self._pause = 0.0  # seconds between its last look and the next one
        self._looked_at: PassStart | None = None  # what that look saw
        self.state = "waiting"  # "waiting" (no such folder yet) | "guarded" | "failing" | "ended" (removed)
        self.ended_at: float | None = None  # seconds since 1970
        self.ended_words = ""  # in which state it ended, as `status` says it
        self.is_away = False  # its folder is missing, and another file system is there: nobody removed it
        # The mount point of its folder when it was seen last, maybe by an earlier process.
        self.was_on: str | None = None
        self.trouble: CkptguardError | None = None
        self.last_pass = PassResult()
        self.last_pass_at: str | None = None
        self.passes = 0
        self.due = 0.0  # monotonic
        self.scrub = _scrub_state(url, settings)  # None: it is not scrubbed
        self.replicas: tuple[Replica, ...] = ()  # as of their last update
        self.verdicts = 0  # given since the start
        self.hooks, self.log, self._presence = hooks, hooks.log, presence
        self._feed = feed
        self._notes = self._new_notes()
        self._noted = self._beside()
        self._note_again_at = 0.0  # monotonic
        self.watcher: Watcher | None = None  # None: nothing watches it
        self.hears: Callable[[], bool] = lambda: False  # whether the queue of a store's hints answers
        self._hinted_at = self._look_began = float("-inf")  # monotonic: the last hint, and the last look
        self._unhinted_since = float("inf")  # monotonic: a later hint was about what changed last
        self.yields = False  # only look while another daemon guards it
        self.daemon_timeout: float | None = None  # seconds for which a save may wait for that daemon; None: forever
        self.guards = True  # False: another daemon does, as of the last pass
        self._known: Known | None = None
        self._ledger: frozenset[str] | None = None  # the names in it when a step began; None between steps
        self._source, self._caller_acts = source, caller_acts
        self._missed, self._owes, self._owes_known_good = MissedIncidents(source), False, False
        self._reports_due: list[str] = []  # the ids of incidents about saves that were judged before their turn
        self._asked: set[str] = set()
        self._asked_lock = threading.Lock()
        self._device: int | None = None  # of its folder
        self._opened: tuple[object, DaemonRecord | None] | None = None  # what `run` was opened at, and who guarded it
        self._first: tuple[_Identity, _Identity] = None, None  # of its folder and of the first of its records
        self._presence_lost = False  # somebody removed the record of it a moment ago
        self._going: tuple[frozenset[str], float] | None = None  # what is left without records, and since when
        self._failures = 0
        self._logged: dict[str, None] = {}
        self._records_changed = False
        self._reported_not_understood = False
        self._lacked_room_at: float | None = None  # monotonic; None if that is not the last that was logged
        self._asked_others_at = float("-inf")  # monotonic

    def take(self, name: str, settings: Settings, hooks: Hooks) -> None:
        """Give it a name and settings. The next pass works by them."""
        self.name = name
        if settings != self.settings:
            self.settings, self.hooks, self.scrub = settings, hooks, _scrub_state(self.url, settings)
            self._store = None

    def note_scrub(self, state: ScrubState) -> None:
        """Note how far a scrub came, unless other settings were given to the run meanwhile."""
        now = self.scrub
        if now is not None and (now.every, now.rate) == (state.every, state.rate):
            self.scrub = state

    def open(self, listed: ListedRun | None = None) -> Run:
        """Open the run again, so that a removed folder is noticed (NotFoundError) and not created by our records."""
        return open_run(self.url, self.settings, may_begin=False, listed=listed)

    def _open_if_changed(self) -> tuple[Run, DaemonRecord | None]:
        """Return the run, and the daemon on record. Nothing is opened and read again that certainly is as it was."""
        inside = ("", RECORDS_FOLDER, f"{RECORDS_FOLDER}/{FORMAT_KEY}", f"{RECORDS_FOLDER}/{DAEMON_KEY}")
        identities = {key: _identity(os.path.join(self.url, key)) for key in inside}
        first = (identities[""], identities[f"{RECORDS_FOLDER}/{FORMAT_KEY}"])
        known = [(was, now) for was, now in zip(self._first, first, strict=True) if was is not None and now is not None]
        # On another file system it may be the same run, mounted again.
        if any(was[0] == now[0] and was != now for was, now in known):
            self._know_nothing()  # the run was removed, and another one begun since the last pass
        self._first = (first[0] or self._first[0], first[1] or self._first[1])
        now = (self.settings, *identities.values())
        if self.run is None or self._opened is None or self._opened[0] != now or None in now or self.settings.records:
            self.run = self.open(self._store)
            reads = self.yields or self._presence is not None
            self._opened = now, read_daemon_record(self.run) if reads else None
        return self.run, self._opened[1]

    def was_removed(self) -> bool:
        """True if this run was guarded, and somebody removed it, or is removing it. Never of a mount that is away."""
        if not os.path.isabs(self.url) or self._device is None:
            return False
        if self._device_now() != self._device:
            return False
        return is_missing(self.url) or were_removed(os.path.join(self.url, RECORDS_FOLDER))

    def _mount_is_away(self) -> bool:
        return self.was_on is not None and self.was_on != mount_of(os.path.realpath(self.url))[0]

    def _device_now(self) -> int | None:
        """Return the file system in which the run's folder is, or would be."""
        place = self.url
        while True:
            try:
                return os.stat(place).st_dev
            except FileNotFoundError:
                place = os.path.dirname(place)
            except OSError:
                return None

    def look(self) -> RunView:
        """Return the run as it is now, for one call in one thread. Raises NotFoundError."""
        return RunView(self.open(), self.settings, self.memory)

    def look_at_all(self) -> RunView:
        """The same with its files listed, as quickly as the last pass allows. Raises StorageError."""
        view = self.look()
        start_of(view, self._notes.start)
        return view

    @property
    def memory(self) -> RunMemory:
        """What its records said, for all who look at it."""
        return self._notes.memory

    def ask(self, path: str) -> None:
        """Read a checkpoint again in the next pass, whatever the records say. Any thread may call it."""
        with self._asked_lock:
            self._asked.add(path)

    def repair_soon(self) -> None:
        """Make the next pass do its automatic repairs. Any thread may call it."""
        self._notes.prune_at = 0.0

    def asks_others_for_room(self) -> bool:
        """True if the next saves may not fit unless other runs on the file system release copies. Not all the time."""
        now = time.monotonic()
        if not self.last_pass.short_of_room or now < self._asked_others_at + _BETWEEN_REQUESTS:
            return False
        self._asked_others_at = now
        return True

    def look_soon(self) -> None:
        """Have the next pass look at the records, which nobody watches. Any thread may call it."""
        self._records_changed = True

    def hint(self) -> None:
        """Note that the store says that something changed here. Any thread may call it."""
        self._hinted_at = time.monotonic()

    def step(self, work: Work, *, assume_quiet: bool = False) -> PassResult | None:
        """Make one pass, and set when the next one is due. None if it failed, which is logged and never raised.

        `assume_quiet`: nobody writes any more. Such a pass verifies all there is, also if a daemon guards the run.
        """
        began = time.monotonic()
        if self.watcher is not None:  # here, in the run's own lane, because its mount may hang
            self.watcher.watch(self.url, self.run_id)
        try:
            done = self.last_pass
            if not self._rests() or assume_quiet:
                self._noted, self._records_changed = self._beside(), False
                with self._one_listing():
                    done = self._pass(work, assume_quiet=assume_quiet)
        except Exception as error:
            self._note_failure(error)
            return None
        finally:
            self.memory.pack()
            self._ledger = None
        self._note_success(done, began)
        return done

    def _note_failure(self, error: Exception) -> None:
        """Say in which state the run is because a pass over it failed, and when to try again."""
        known = error if isinstance(error, CkptguardError) else machine_trouble(error)
        if known is None and isinstance(error, OSError):
            known = CkptguardError(str(error))
        if known is None:
            if type(error).__name__ not in self._logged:
                self.log("pass_failed", level="error", trace=True, run=self.url)
                self._logged[type(error).__name__] = None
            known = CkptguardError(f"{type(error).__name__}: {error}")
            self._failed("failing", known, pause=self._backoff())
        elif self.was_removed():
            self._ended(time.time() if self.ended_at is None else self.ended_at, REMOVED)
            self.due = time.monotonic() + min(self.settings.scan_interval, 1.0)
        elif isinstance(known, NotFoundError):
            self.is_away = os.path.isabs(self.url) and (self._device is not None or self._mount_is_away())
            state = "failing" if self.is_away else "waiting"
            self._failed(state, known, pause=min(self.settings.scan_interval, 1.0))
        elif isinstance(known, RunRemovedError) and self._failures < _REFUSED_AT_MOST:
            self.due = time.monotonic() + self._backoff()  # it is going; if it stays, its records are made again
        else:
            self._failed("failing", known, pause=self._backoff())

    def _note_success(self, done: PassResult, began: float) -> None:
        """Say in which state the run is after a pass, and set when the next one is due."""
        self._failures = 0
        if self.trouble is not None:
            self._logged = {k: None for k in self._logged if not k.startswith(("failing ", "waiting "))}
            self.log("recovered", run=self.url)
        if done.ended_at is not None:
            self._ended(done.ended_at, ended_words(self.url))
        else:
            self.state, self.trouble, self.ended_at, self.is_away = "guarded", None, None, False
        self.last_pass, self.last_pass_at = done, utc_now()
        self.passes += 1
        now = time.monotonic()
        pause = self._pause = self.settings.scan_interval if self._store is None else self._until_next_look(done, began)
        if not self.guards and self.daemon_timeout is not None:
            pause = min(pause, _VERDICTS_SEEN)
        if done.next_in is not None:
            # A slow listing must not repeat at once: training has priority on the storage.
            cost = 0.0 if done.checked else now - began
            pause = min(pause, max(done.next_in + 0.01, _SOONEST, 2 * cost))
        self.due = now if done.yielded else now + pause

    def _until_next_look(self, done: PassResult, began: float) -> float:
        """Return the seconds until the next look. A look at an object store costs money, so it follows the run. Hints
        are relied on while the last change that a look found was hinted at, and their queue answers."""
        before, start = self._looked_at, self._notes.start
        self._looked_at, looked_before, self._look_began = start, self._look_began, began
        if start is None:
            return self.settings.scan_interval
        if before is not None and start.listing.entries != before.listing.entries:
            self._unhinted_since = looked_before
        changed = start != before or bool(done.checked or done.pending)
        saved = {series: own.saved_at for series, own in start.listing.series.items() if own.saved_at}
        interval, newest = shortest_interval(saved), max((max(times) for times in saved.values()), default=None)
        training = is_training(time.time(), newest, interval)
        return next_pause(
            self.settings.scan_interval,
            self._pause,
            changed=changed,
            save_interval=interval if training else None,
            is_hinted=self._hinted_at >= self._unhinted_since and self.hears(),
        )

    def _ended(self, at: float, words: str) -> None:
        """Show that the run was removed, and know nothing of it any more: another one may get its name."""
        if self.state != "ended":
            self.log("ended", run=self.url)
            self.scrub, self.last_pass = _scrub_state(self.url, self.settings), PassResult()
            self._know_nothing()
        self._notes.was_empty = True
        self._first = None, None
        self.state, self.trouble, self.ended_at, self.ended_words, self.run = "ended", None, at, words, None

    def _new_notes(self) -> PassNotes:
        return PassNotes() if self._feed is None else PassNotes(memory=self._feed.memory(self.run_id))

    def _know_nothing(self) -> None:
        self._notes, self._known, self._missed = self._new_notes(), None, MissedIncidents(self._source)
        self._reports_due = []
        if self._feed is not None:
            self._feed.gone(self.run_id)

    def _rests(self) -> bool:
        """True if the last pass left nothing to do, and nothing has changed since for certain. Otherwise, what changes
        from now on is counted."""
        if self.watcher is None or self.settings.records is not None:  # nobody watches records elsewhere
            return False
        done = self.last_pass
        idle = self.state == "guarded" and self.passes and not self._asked and not (done.pending or done.unread)
        idle = idle and not self._records_changed and self._noted == self._beside() and not self._owes
        idle = idle and not self._owes_known_good and not self._presence_lost
        held = self._feed is None or self._feed.holds(self.run_id)
        if idle and held and self._notes.has_nothing_due(self.settings) and self.watcher.rests(self.run_id):
            return self.run is not None and not self._notes.room.look(self.run)[1]
        self.watcher.settle(self.run_id)
        return False

    def _beside(self) -> tuple[object, ...]:
        """Return what others did in the run, which a pass notes in the catalogue. Nobody watches our records."""
        try:
            sampled = os.stat(os.path.join(self.url, RECORDS_FOLDER, SAMPLES)).st_mtime_ns
        except OSError:
            sampled = 0
        return self.replicas, self.scrub and self.scrub.last, sampled

    def leave(self) -> None:
        """Record that this daemon no longer guards the run."""
        if self.run is not None and self._presence is not None:
            try:
                clear_daemon_record(self.run, self._presence)
            except CkptguardError as error:
                self.log("presence_not_cleared", level="warning", run=self.url, reason=error.message)

    def _one_listing(self) -> contextlib.AbstractContextManager[object]:
        """Have all that a pass asks of an object store answered by one listing."""
        if os.path.isabs(self.url):
            return contextlib.nullcontext()
        if self._store is None:
            self._store = open_listed(self.url, self.settings)
        return self._store.look() if self._store is not None else contextlib.nullcontext()

    def _pass(self, work: Work, *, assume_quiet: bool) -> PassResult:
        """See what the run is and who guards it, verify what is new or only look, report, and note what was seen."""
        run, on_record = self._open_if_changed()
        view = RunView(run, self.settings, self.memory)
        refused = times_refused(self.url)
        if os.path.isabs(self.url):
            self._find_its_place(view)
        if self._known is None and (ended := ended_at(view)) is not None:
            return PassResult(ended_at=ended)
        if self._caller_acts and not has_records(run) and not view.checkpoints:
            return PassResult(not_understood=view.listing.not_understood)
        self._begin_guarding(view, on_record, assume_quiet=assume_quiet)
        with self._asked_lock:
            asked, self._asked = self._asked, set()
        done = None
        try:
            done = self._verify_or_look(view, work, assume_quiet=assume_quiet)
        finally:
            if done is None or (self.guards and self._notes.waited):
                with self._asked_lock:
                    self._asked |= asked
        if self.was_removed():
            raise NotFoundError(f"{self.url} was removed")
        if done.ended_at is not None or (self.guards and self._notes.waited):
            return done
        # What failed because somebody removes the run is no trouble. If nobody does, the next pass reports the rest.
        self._report(view, done, quiet=work.is_stopped() or times_refused(self.url) != refused)
        touched = {c.path for c in done.checked} | {w.path for w in done.pending if self.guards}
        for path in sorted(asked - touched):
            if not self._read_again(view, path, work):
                self.ask(path)
                done = msgspec.structs.replace(done, yielded=True)
        wrote = bool(done.checked or asked)
        wrote |= self.guards and not self._caller_acts and self._record_missed(view, wrote=wrote)
        self._note(view, wrote=wrote or bool(done.pruned or done.thinned), troubled=bool(done.could_not_tell))
        return done

    def _begin_guarding(self, view: RunView, on_record: DaemonRecord | None, *, assume_quiet: bool) -> None:
        """Decide whether this process guards the run, say so on record, and note what was known before it does."""
        other = on_record if self.yields and on_record not in (None, self._presence) else None
        guards = other is None or assume_quiet or not self._may_rely_on(other)
        begins = self._known is None or guards != self.guards
        self.guards = guards
        if begins:
            self._known = known_outcomes(view.history)
            self.log("guarding" if self.guards else "looking", run=self.url, run_id=self.run_id)
        new = on_record is None or other is not None or (self.passes == 0 and on_record != self._presence)
        records = view.run.records.root or ""
        self._presence_lost = on_record is None and was_lasting(records, os.path.join(records, DAEMON_KEY))
        if self._presence is not None and self.guards and new and not self._presence_lost:
            write_daemon_record(view.run, self._presence)
            note_lasting(records, os.path.join(records, DAEMON_KEY))
        owes = self.guards and not self._caller_acts and not self._missed.has_begun
        if owes and (has_records(view.run) or view.checkpoints):  # see `Hooks.begin`
            self._missed.begin(view)
        if begins and self.guards:
            self.hooks.begin(view)

    def _verify_or_look(self, view: RunView, work: Work, *, assume_quiet: bool) -> PassResult:
        """Verify what is new, and tell each verdict at once; or only look while another process guards the run."""
        if not self.guards:
            return pass_read_only(view, self._notes)

        def on_verdict(checked: Checked) -> None:
            self.verdicts += 1
            self._tell(view, checked)
            self._note_early(view)
            work.on_verdict(checked)

        is_noted = self.passes > 0

        def may_begin(size: int) -> bool:
            nonlocal is_noted
            if not is_noted:  # the first pass may read for hours, and nothing else says what waits
                is_noted = True
                self._note(view, wrote=False)
            return work.may_begin(size)

        def on_early(checkpoint: Checkpoint, words: str) -> None:
            waits = PendingSave(path=checkpoint.path, series=checkpoint.series, step=checkpoint.step, reason=words)
            self._log_once("pending", path=waits.path, step=waits.step, reason=words)
            others = (other for other in self.last_pass.pending if other.path != waits.path)
            self.last_pass = msgspec.structs.replace(self.last_pass, pending=(*others, waits))
            work.on_early(checkpoint, words)

        own = msgspec.structs.replace(work, on_verdict=on_verdict, on_early=on_early, may_begin=may_begin)
        self._notes.shared = self.shared
        return reconcile(view, self._notes, work=own, assume_quiet=assume_quiet)

    def _may_rely_on(self, other: DaemonRecord) -> bool:
        """True if this process may leave the run to another daemon, which guards it as far as is known."""
        if self.daemon_timeout is None:
            return not surely_ended(other)
        waiting = (sample.since for sample in self._notes.samples.values() if not sample.done)
        late = min(waiting, default=math.inf) + self.settings.settle + self.daemon_timeout
        return time.monotonic() < late and answers(other)

    def _find_its_place(self, view: RunView) -> None:
        """See where the run's folder is. Raises NotFoundError if its records went, and CouldNotTellError if it did."""
        device, inside = os.stat(self.url).st_dev, view.run.records_inside
        is_new = self._device is None
        moved = self._mount_is_away() if is_new else self._device != device
        # Of a mount that an earlier process saw nobody knows more: saves there are a training, which is guarded.
        doubtful = moved and (not view.entries if is_new else self.passes)
        if doubtful and not (has_records(view.run) if inside else view.entries):
            self.is_away = True
            raise CouldNotTellError(f"another file system is at {self.url} than before")
        if self._device != device:
            self.was_on = mount_of(os.path.realpath(self.url))[0]
        self._device, self.storage = device, f"device {device}"  # its name may lead through links
        records = view.run.records.root
        if records is None or not were_removed(records):
            self._going = None
            return
        now, left = time.monotonic(), frozenset(entry.key for entry in view.entries)
        since = now if self._going is None or left < self._going[0] else self._going[1]
        self._going = left, since  # names only go while it is removed; training adds some, and changes files
        if not view.checkpoints or now - self._going[1] < _GOING + self.settings.settle:
            raise NotFoundError(f"the records of {self.url} were removed")
        begin_again(records)
        self._know_nothing()

    def _note(self, view: RunView, *, wrote: bool, troubled: bool = False) -> None:
        """Note in the catalogue what this pass saw."""
        if self._feed is not None:
            notes, every = self._notes, None if self.scrub is None else self.scrub.every
            seen = Passed(notes=notes, replicas=self.replicas, wrote=wrote, troubled=troubled, scrub_interval=every)
            self._feed.note(view, seen)

    def _note_early(self, view: RunView) -> None:
        """Note a verdict before the pass ends, which may take long. Of many verdicts only some are noted so: what it
        costs grows with the run."""
        began = time.monotonic()
        if began >= self._note_again_at:
            self._note(view, wrote=True)
            self._note_again_at = time.monotonic() + _NOTING_SHARE * (time.monotonic() - began)

    def _read_again(self, view: RunView, path: str, work: Work) -> bool:
        """Verify one checkpoint again. False if it must yield to others."""
        checkpoint = view.look_again(path)
        if checkpoint is None:
            self.log("no_such_checkpoint", level="warning", run=self.url, path=path)
            return True
        if not work.may_begin(checkpoint.bytes):
            return False
        try:
            checked = verify_checkpoint(view, checkpoint, work=Work(scanner=work.scanner))
        except CkptguardError as error:
            self.log("could_not_tell", level="warning", run=self.url, path=path, reason=error.message)
            return True
        self._tell(view, checked)
        self._log_known_good(view)
        if checked.outcome is Outcome.BAD:
            self.repair_soon()
        return True

    def _report(self, view: RunView, done: PassResult, *, quiet: bool) -> None:
        if done.checked or self._owes_known_good:
            self._log_known_good(view)
        if self._reports_due and not done.yielded:  # each save had its turn
            self._leave_due_reports(view)
        for waiting in done.pending:
            self._log_once("pending", path=waiting.path, step=waiting.step, reason=waiting.reason)
        if done.could_not_tell and not quiet:
            quiet = self._has_lost(view) or self._notes.records_go(view.run)
        for sentence in () if quiet else (*done.could_not_tell, *done.unread):
            self._log_once("could_not_tell", level="warning", reason=sentence)
        if done.not_understood is not None:
            sentence, hint = done.not_understood.notes
            if not self._reported_not_understood:
                self.log("not_understood", level="warning", run=self.url, reason=f"{sentence}; {hint}")
            self._reported_not_understood = True
        for path in done.gone:
            self.log("gone", run=self.url, path=path)
        for path in done.unverified:
            self.log("unverified", run=self.url, path=path)
        late = done.late
        if late is not None and self._log_once("unfinished", level="warning", path=late.path, reason=late.reason):
            written_at = next((c.written_at for c in view.checkpoints if c.path == late.path), 0)
            event = unfinished_event(view.run, late.path, late.step, late.reason, written_at, source=self._source)
            self.hooks.tell_once(view.run, event)
        if done.lost is not None:
            self.log("lost", level="warning", run=self.url, reason=done.lost)
        for path in done.pruned:
            self.log("pruned", run=self.url, path=path)
        for path in done.thinned:
            self.log("thinned", run=self.url, path=path)
        self._report_room(done)

    def _report_room(self, done: PassResult) -> None:
        """Log once that there is no room for all copies, and once that there is again for a while: near the limit
        each save changes it."""
        now = time.monotonic()
        if done.room is not None:
            if self._lacked_room_at is None:
                gone = f"; released: {', '.join(done.room.released)}" if done.room.released else ""
                self.log("not_enough_room", level="warning", run=self.url, reason=f"{done.room.problem}{gone}")
            self._lacked_room_at = now
        elif self._lacked_room_at is not None and now - self._lacked_room_at >= _ROOM_STAYS:
            self.log("enough_room", run=self.url)
            self._lacked_room_at = None

    def _waited(self, view: RunView, one: Checked) -> float | None:
        """Return the seconds from the last write of a save to its first verdict, which this one is. None: it had one
        before, or nobody knows when it was written."""
        found = None if one.id is None else view.history.current_verdict(one.id)
        if one.id is None or (found is not None and (found.number > 1 or self._was_on_record(found))):
            return None
        sealed = view.history.manifest(one.id) if view.history.is_sealed(one.id) else None
        there = view.checkpoint(one.path)
        written = saved_at(sealed) if sealed is not None else there and there.written_at / 1e9
        return max(0.0, time.time() - written) if written else None  # another machine's clock may be ahead

    def _was_on_record(self, verdict: CurrentVerdict) -> bool:
        """True if a verdict was on record when this step began to look: the same bytes were read again."""
        if self._ledger is None:
            names = () if self._notes.start is None else self._notes.start.names
            self._ledger = frozenset(name for name in names if name.startswith(f"{LEDGER}/"))
        return f"{LEDGER}/{series_folder(verdict.id.series)}/{verdict_name(verdict)}" in self._ledger

    def _tell(self, view: RunView, one: Checked) -> None:
        """Log a verdict, and report it if it is news."""
        run, waited = view.run, self._waited(view, one)
        if one.outcome is not Outcome.GOOD and self.was_removed():
            return  # what was left of it was judged
        self.log(
            "verified",
            level="info" if one.outcome is Outcome.GOOD else "warning",
            run=self.url,
            path=one.path,
            step=one.step,
            id=one.id and str(one.id),
            outcome=one.outcome.value,
            bytes=one.bytes,
            seconds=one.seconds,
            waited=waited and round(waited, 3),
            reason=reason_of(one),
        )
        assert self._known is not None
        for news in news_in((one,), self._known):
            self.hooks.tell(run, verdict_event(run, news, source=self._source))
            if self._caller_acts:
                continue
            try:
                early = self._is_early(view, news.series, news.step)
                incident = record_bad_save(run, news, source=self._source, report=not early)
                if incident is not None and early:
                    self._reports_due.append(incident.id)
            except RunRemovedError:
                pass
            except CkptguardError as error:
                self.log("incident_not_recorded", level="warning", run=self.url, path=news.path, reason=error.message)

    def _is_early(self, view: RunView, series: str, step: Step) -> bool:
        """True if earlier saves of a series still wait for their verdicts."""
        own = (c for c in view.checkpoints if c.series == series and numbers_of(c.step) < numbers_of(step))
        samples = (self._notes.samples.get(checkpoint.path) for checkpoint in own)
        return any(sample is not None and not sample.done for sample in samples)

    def _leave_due_reports(self, view: RunView) -> None:
        """Write the reports of incidents about saves that were judged before their turn: now it is known what was good
        before them."""
        due, self._reports_due = self._reports_due, []
        for id in due:
            with contextlib.suppress(CkptguardError):  # the commands make reports from the records
                incident = read_incident(view.run, id)
                if incident is not None:
                    leave_report(view.run, incident)

    def _record_missed(self, view: RunView, *, wrote: bool) -> bool:
        """Open and close the incidents that others left undone. True if the records may have changed."""
        names = None if wrote or self._notes.start is None else self._notes.start.names
        try:
            opened = self._missed.record_missed(view, names)
        except CkptguardError as error:
            self._owes = True
            if not isinstance(error, RunRemovedError):  # it is going, or the next pass records them
                self._log_once("incident_not_recorded", level="warning", path=".", reason=error.message)
            return True
        self._owes = False
        for one in opened:
            self.log("incident_made_up", level="warning", run=self.url, path=one.path, id=one.id and str(one.id))
            self.hooks.tell(view.run, verdict_event(view.run, one, source=self._source))
        return bool(opened)

    def _log_known_good(self, view: RunView) -> None:
        self._owes_known_good = False
        try:
            good = find_known_good(view.run)
            self.log("known_good", run=self.url, id=str(good.id), path=good.path)
        except CkptguardError as error:
            if self.was_removed() or self._has_lost(view):
                self._owes_known_good = True
                return
            self.log("known_good", level="warning", run=self.url, id=None, reason=error.message)

    def _has_lost(self, view: RunView) -> bool:
        """True if a file that the pass listed has gone. If nobody removes the run, the next pass says what is wrong."""
        files = (entry.key for entry in view.entries if entry.kind != "folder")
        return os.path.isabs(self.url) and any(is_missing(os.path.join(self.url, key)) for key in files)

    def _failed(self, state: str, error: CkptguardError, *, pause: float) -> None:
        self.state, self.trouble = state, error
        if isinstance(error, NotFoundError):
            self.run = None
            if self._feed is not None:
                self._feed.gone(self.run_id)
        # What a search found and nobody has read yet was removed in between. A mount that is away is another matter.
        if not (state == "waiting" and self.was_found):
            self._log_once(state, level="warning", kind=error.kind, reason=error.message)
        self.due = time.monotonic() + pause

    def _backoff(self) -> float:
        pause = self.settings.scan_interval * 2 ** min(self._failures, _DOUBLINGS)
        self._failures += 1
        return float(min(pause, _LONGEST_BACKOFF))

    def _log_once(self, event: str, *, level: str = "info", **fields: object) -> bool:
        """Log what was not logged yet. Returns whether that is so."""
        key = f"{event} {sorted(fields.items())}"
        if key in self._logged:
            return False
        while len(self._logged) >= _REMEMBERED:
            del self._logged[next(iter(self._logged))]
        self._logged[key] = None
        self.log(event, level=level, trace=False, run=self.url, **fields)
        return True
