"""What supervise does about a run's saves while and after the command runs: check, judge, and roll back.

All of it runs in one thread beside the command's own. A failure here is reported, and the command keeps running.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from ckptguard.decisions.restarts import GAVE_UP
from ckptguard.decisions.rollback import before_repeat
from ckptguard.decisions.rollback_plan import Content
from ckptguard.errors import CkptguardError, CouldNotTellError, NoKnownGoodError, NotFoundError, NotGivenBackError
from ckptguard.keep.quarantine import quarantine
from ckptguard.layouts import Checkpoint
from ckptguard.records.incidents import Incident, list_incidents, update_incident
from ckptguard.records.pins import InUse
from ckptguard.records.run import Run, has_records, open_run
from ckptguard.recover.roll_back import GoBack, RolledBack, roll_back
from ckptguard.recover.rollback_scope import content_of, training_in
from ckptguard.reporting.channels import Event
from ckptguard.reporting.events import Known, known_outcomes, news_in, reason_of, verdict_event
from ckptguard.runs.find_known_good import Wanted, newest_candidate
from ckptguard.runs.not_understood import NotUnderstood
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.scan import Scanner
from ckptguard.supervise.sick_saves import SickSave, find_begun_anew, find_sick_saves
from ckptguard.upkeep.reconcile import PassNotes, PassResult, reconcile
from ckptguard.values.ids import MAX_STEP, CheckpointId, folder_of
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.collect_evidence import unfinished_because

_SOONEST, _LOCAL, _SHARE = 0.2, 2.0, 20.0
Tell = Callable[[str], None]  # receives a sentence for people
Folders = frozenset[str]  # of one training
_OURS = ("supervise", "daemon", "cli", "gate")  # sources of incidents from outside the command


class StateBefore(msgspec.Struct, frozen=True, kw_only=True):
    """What existed when the command was started: good generations, signatures of the files, incidents."""

    good: frozenset[CheckpointId] = frozenset()
    lying: frozenset[object] = frozenset()
    incidents: frozenset[str] = frozenset()


class SavesSince(msgspec.Struct, frozen=True, kw_only=True):
    """What happened since: anything `saved`, anything `good`, and whether the command's guard `gave_up`."""

    saved: bool
    good: bool
    gave_up: bool


class SupervisedRollback(msgspec.Struct, frozen=True, kw_only=True):
    """What each training went back to, and what was moved aside. Without `to` the command starts from its beginning."""

    to: tuple[str, ...] = ()
    ids: tuple[CheckpointId, ...] = ()
    quarantined: tuple[str, ...] = ()


class SaveWatch:
    """Watches the saves of one run. `tell` gets sentences for people, `event` gets what hooks receive."""

    def __init__(
        self,
        url: str,
        settings: Settings,
        scanner: Scanner,
        *,
        tell: Tell,
        event: Callable[[Event], None],
        begin_telling: Callable[[RunView], None] = lambda view: None,
    ) -> None:
        self._url, self._settings, self._scanner = url, settings, scanner
        self.tell, self.event, self._begin_telling = tell, event, begin_telling
        self._known: Known | None = None  # outcomes that were reported before
        self._notes = PassNotes()
        self._told: set[str] = set()
        self._told_not_understood = False
        self._before: frozenset[object] = frozenset()  # what existed at the very beginning
        self._left_open: set[str] = set()  # incidents of guards that ended without closing them
        self._abandoned: set[str] = set()  # incidents of a killed supervise
        self._series: set[str] = set()  # ever had saves in place: to go back in them even if nothing is left
        self._targets: dict[str, int] = {}  # folder -> the step that it last went back to because of sickness
        self._to_compare: list[Content] = []  # what was gone back to, until the first save after it
        self._pinned: InUse | None = None  # the pins of the same
        self._lying: frozenset[object] = frozenset()  # at the start of the command
        self._seen: object = None  # the records and files that `_found` was concluded from
        self._found: list[SickSave] = []

    def prepare(self) -> CkptguardError | None:
        """Record what exists at the beginning. Returns the error if settings or records make supervision impossible."""
        try:
            self.open()
        except NotFoundError as error:
            return error if os.path.exists(self._url) else None  # a file, not a folder
        except CkptguardError as error:
            return error
        self._before = self._signatures()
        if (found := self.not_understood()) is not None:
            self.tell_not_understood(found)
        return None

    def take_over(self, series: Iterable[str], targets: Mapping[str, int]) -> None:
        """Continue after a killed supervise: the series that had saves, and the steps that it went back to."""
        self._series |= set(series)
        self._targets.update(targets)
        self._abandoned = {i.id for i in self._incidents() if i.state != "closed" and i.source == "supervise"}

    @property
    def to_take_over(self) -> tuple[tuple[str, ...], dict[str, int]]:
        """Return the arguments for `take_over` if we are killed. May be called from another thread."""
        return tuple(sorted(self._series.copy())), self._targets.copy()

    def begin(self) -> StateBefore:
        """Record the state before the command starts."""
        self._left_open |= {i.id for i in self._guards_incidents()}
        self._lying = self._signatures()
        return StateBefore(good=self._good(), lying=self._lying, incidents=frozenset(i.id for i in self._incidents()))

    def since(self, before: StateBefore) -> SavesSince:
        """Return what happened since then."""
        given_up = [i for i in self._incidents() if i.actions and i.actions[-1].startswith(GAVE_UP)]
        return SavesSince(
            saved=not self._signatures() <= before.lying,
            good=not self._good() <= before.good,
            gave_up=any(i.id not in before.incidents and i.source not in _OURS for i in given_up),
        )

    def not_understood(self) -> NotUnderstood | None:
        """Return what in the run may be state and nothing verifies, as of now."""
        with self._complaining():
            return self._look().listing.not_understood
        return None

    def watch(self, until: threading.Event) -> list[SickSave]:
        """Make passes until a save is sick that no guard in the command deals with, or until `until` is set."""
        while not until.is_set():
            pause = self._settings.scan_interval
            with self._complaining():
                began = time.monotonic()
                done = self._pass(until)
                found = self.sick()
                self._tell_of(done, found)
                if found and not self._guards_incidents():
                    return found
                pause = self._pause(done, time.monotonic() - began)
            until.wait(pause)
        return []

    def last_look(self) -> list[SickSave]:
        """Verify what the ended command left, and return what is sick."""
        done = self._pass(threading.Event(), assume_quiet=True)
        found = self.sick()
        self._tell_of(done, found)
        return found

    def tell_not_understood(self, found: NotUnderstood) -> None:
        """Say once that there are files that nothing verifies, and what to do."""
        if not self._told_not_understood:
            self._told_not_understood = True
            for sentence in found.notes:
                self.tell(sentence)

    def sick(self) -> list[SickSave]:
        """Return the sick saves by the current records; none if they cannot be read."""
        with self._complaining():
            view = self._look()
            seen = (view.history.names, view.history.quarantined, [c.signature for c in view.checkpoints])
            if seen != self._seen:
                self._found = self._begun_anew(view) or find_sick_saves(view, before=self._before)
                self._seen = seen
            return self._found
        return []

    def _begun_anew(self, view: RunView) -> list[SickSave]:
        """Return the first save of a training that began from scratch instead of continuing."""
        for known_good in tuple(self._to_compare):
            told, anew = find_begun_anew(view, known_good, self._lying)
            if anew is not None:
                return [anew]
            if told:
                self._to_compare.remove(known_good)
        if not self._to_compare:
            self._unpin()
        return []

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.__exit__()
            self._pinned = None

    def go_back(self, sick: list[SickSave], reason: str) -> SupervisedRollback:
        """Quarantine what is newer than known-good, and make all names that a resume reads hold known-good content.

        This concerns the trainings of the sick saves, or after a crash all trainings. Raises the errors of a rollback,
        but NoKnownGoodError only about sick saves and about names that nothing good fits.
        """
        view = self._look()
        done: list[RolledBack] = []
        moved: list[str] = []
        for training in dict.fromkeys(training_in(view, s.folder) for s in sick):
            own = [s for s in sick if s.folder in training]
            if any(s.anew for s in own):
                for checkpoint in view.checkpoints:
                    if folder_of(checkpoint.path) in training and checkpoint.signature not in self._lying:
                        quarantine(view, checkpoint.path, reason=reason)
                        moved.append(checkpoint.path)
                done.append(self._roll_back(view, training, reason, None))
            else:
                done.append(self._go_back_in(view, training, own, reason))
        if not sick:
            done, moved = self._go_back_everywhere(view, reason)
        moved += [path for one in done for path in one.quarantined]
        to, ids = [one.known_good.path for one in done], [one.known_good.id for one in done]
        self._compare_with(view, done)
        return SupervisedRollback(to=tuple(to), ids=tuple(ids), quarantined=tuple(dict.fromkeys(moved)))

    def _compare_with(self, view: RunView, done: list[RolledBack]) -> None:
        """Pin what was gone back to until the next start has saved something, to compare the two.

        This is done for each folder of a training, because any of them may get the first save.
        """
        self._unpin()
        self._pinned = InUse(view.run, "supervise")
        for id in (id for one in done for id in (one.known_good.id, one.source)):
            self._pinned.pin(id)
        view.forget()
        folders = sorted({f for one in done for f in training_in(view, folder_of(one.known_good.series))})
        newest = [newest_candidate(view, Wanted(folders=frozenset((folder,)))) for folder in folders]
        self._to_compare = [content_of(candidate) for candidate in newest if candidate is not None]
        for content in self._to_compare:
            self._pinned.pin(content.id)

    def close_left_incidents(self, action: str) -> None:
        """Close the open incidents of the command's guard or of a killed supervise, with what we did."""
        abandoned = [i for i in self._incidents() if i.id in self._abandoned and i.state != "closed"]
        for incident in (*abandoned, *self._guards_incidents()):
            with self._complaining():
                update_incident(self.open(), incident, state="closed", action=action)

    def _go_back_everywhere(self, view: RunView, reason: str) -> tuple[list[RolledBack], list[str]]:
        done: list[RolledBack] = []
        moved: list[str] = []
        self._note_series(view.checkpoints)
        for training in dict.fromkeys(training_in(view, folder_of(series)) for series in sorted(self._series)):
            try:
                done.append(self._roll_back(view, training, reason, None))
            except NotGivenBackError:
                raise
            except NoKnownGoodError:
                view.forget()
            # Some series have nothing good. Files that the dead command left half-written would only stop the next
            # start.
            for checkpoint in self._of_no_use(view, training):
                quarantine(view, checkpoint.path, reason=reason)
                moved.append(checkpoint.path)
        return done, moved

    def _go_back_in(self, view: RunView, training: Folders, sick: list[SickSave], reason: str) -> RolledBack:
        """Roll back one training. If the sickness returned from the last target, go one checkpoint further, if there is
        one."""

        def good_before(step: int) -> int | None:
            found = newest_candidate(view, Wanted(before_step=step, folders=self._to_choose_in(view, training, step)))
            return None if found is None else found.manifest.training_step

        since = min((s.since for s in sick if s.since is not None), default=None)
        limit = MAX_STEP + 1 if since is None else since
        last = next((self._targets[folder] for folder in sorted(training) if folder in self._targets), None)
        before = before_repeat(good_before, limit, last=last)
        why = f"{reason}: {'; '.join(s.reason for s in sick)}"
        done = self._roll_back(view, training, why, since if before == limit else before)
        if done.training_step is not None:
            self._targets |= dict.fromkeys(training, done.training_step)
        return done

    def _roll_back(self, view: RunView, training: Folders, reason: str, before_step: int | None) -> RolledBack:
        # Skip the check for a writing training: we have just stopped it.
        folders = self._to_choose_in(view, training, before_step)
        back = GoBack(reason=reason, folders=folders, before_step=before_step, check_writing=False)
        return roll_back(view, back, work=Work(scanner=self._scanner))

    def _to_choose_in(self, view: RunView, training: Folders, before_step: int | None) -> Folders:
        """Return the folders of a training to search for its known-good checkpoint: those where the command saves.

        If another folder allows a better resume, all folders are searched. An earlier stage in another folder may count
        higher.
        """
        saved = training & {folder_of(c.path) for c in view.checkpoints if c.signature not in self._before}
        own, best = (newest_candidate(view, Wanted(before_step=before_step, folders=f)) for f in (saved, training))
        if own is None or best is None or content_of(own).has_optimizer < content_of(best).has_optimizer:
            return training
        return saved

    def _of_no_use(self, view: RunView, training: Folders) -> list[Checkpoint]:
        """Return new files of series without anything good that are judged not good, or unfinished.

        Unreadable ones may be whole, and stay.
        """
        found = []
        for checkpoint in view.checkpoints:
            if folder_of(checkpoint.path) not in training or checkpoint.signature in self._before:
                continue
            if newest_candidate(view, Wanted(series=checkpoint.series)) is not None:
                continue
            try:
                id = view.current_if_readable(checkpoint)
                judged = id is not None and view.history.has_verdict(id)
                if judged or unfinished_because(view.run.storage, checkpoint, scanner=self._scanner) is not None:
                    found.append(checkpoint)
            except CouldNotTellError as error:
                self._complain(error)
        return found

    def _pass(self, stop: threading.Event, *, assume_quiet: bool = False) -> PassResult | None:
        with self._complaining():
            view = self._look()
            if not has_records(view.run) and not view.checkpoints:
                return None  # a folder of ours in a run without saves keeps some trainers from starting
            if self._known is None:
                self._known = known_outcomes(view.history)
                self._begin_telling(view)
            work = Work(scanner=self._scanner, stop=stop)
            done = reconcile(view, self._notes, work=work, assume_quiet=assume_quiet)
            for sentence in done.could_not_tell:
                self._tell_once(sentence)
            if done.not_understood is not None:
                self.tell_not_understood(done.not_understood)
            return done
        return None

    def _tell_of(self, done: PassResult | None, sick: list[SickSave]) -> None:
        """Tell hooks of everything that turned bad, and people of what is no reason to stop."""
        if done is None or self._known is None:
            return
        acted_upon = {s.path for s in sick}
        for checked in news_in(done.checked, self._known):
            if checked.path not in acted_upon:
                self.tell(f"{checked.path} is {checked.outcome.value}: {reason_of(checked)}")
            self.event(verdict_event(self.open(), checked, source="supervise"))

    def _pause(self, done: PassResult | None, cost: float) -> float:
        """Return the seconds until the next pass: few on a local disk, more if a pass is slow."""
        pause = self._settings.scan_interval
        try:
            if self.open().storage.root is not None:
                pause = min(pause, max(_LOCAL, _SHARE * cost))
        except CkptguardError:
            pause = min(pause, _LOCAL)  # it does not exist yet
        if done is not None and done.next_in is not None:
            pause = min(pause, max(done.next_in + 0.01, _SOONEST, 2 * cost))
        return pause

    def open(self) -> Run:
        """Open the run again."""
        return open_run(self._url, self._settings)

    def _look(self) -> RunView:
        """Return a fresh view of the run for one piece of work."""
        return RunView(self.open(), self._settings)

    def _good(self) -> frozenset[CheckpointId]:
        """Return every generation whose verdict is GOOD, by the names of the ledger alone."""
        with self._complaining():
            history = self._look().history
            standings = [standing for series in history.names for standing in history.standings(series).values()]
            return frozenset(standing.id for standing in standings if standing.outcome is Outcome.GOOD)
        return frozenset()

    def _signatures(self) -> frozenset[object]:
        with self._complaining():
            checkpoints = self._look().checkpoints
            self._note_series(checkpoints)
            return frozenset(c.signature for c in checkpoints)
        return frozenset()

    def _note_series(self, checkpoints: Iterable[Checkpoint]) -> None:
        self._series |= {c.series for c in checkpoints}

    def _guards_incidents(self) -> list[Incident]:
        """Return the incidents that a guard inside the command is dealing with."""
        return [
            i
            for i in self._incidents()
            if i.state != "closed" and i.source not in _OURS and i.id not in self._left_open
        ]

    def _incidents(self) -> list[Incident]:
        try:
            return list_incidents(self.open())
        except CkptguardError:
            return []

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not isinstance(error, NotFoundError):  # the command may still create the folder
            self._tell_once(error.message if isinstance(error, CkptguardError) else f"{type(error).__name__}: {error}")

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self.tell(sentence)
