"""Make one pass over a run: find finished saves, protect them, verify them, keep or release their copies, repair and
prune. The daemon, ``--once`` and the guard repeat this pass. It relies on the storage, never on having seen an event. A
killed pass is simply repeated."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec

from ckptguard.decisions.budget import Budget, WillThin
from ckptguard.decisions.fleet_health import late_in, save_interval, shortest_interval
from ckptguard.decisions.turns import may_yield_for
from ckptguard.errors import ChangedWhileReadError, CouldNotTellError, ObjectMissingError, ResavingError
from ckptguard.keep.quarantine import finish_quarantines
from ckptguard.keep.saved_over import is_saved_over
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.after_seal import MD5S as LATE_MD5S
from ckptguard.records.audit import FOLDER as AUDIT
from ckptguard.records.emptied import FOLDER as EMPTIED
from ckptguard.records.emptied import emptied_key, mark_emptied, unmark_emptied
from ckptguard.records.incidents import FOLDER as INCIDENTS
from ckptguard.records.kept import KeptCopy
from ckptguard.records.leases import TRAININGS
from ckptguard.records.pins import FOLDER as PINS
from ckptguard.records.room import RoomProblem
from ckptguard.records.run import Run, record_names
from ckptguard.records.samples import FOLDER as SAMPLES
from ckptguard.records.scrubs import FOLDER as SCRUBS
from ckptguard.records.scrubs import Where
from ckptguard.records.silences import FOLDER as SILENCES
from ckptguard.records.trash import FOLDER as TRASH
from ckptguard.repair.repair import repair_automatically
from ckptguard.retention.prune import prune_by_settings
from ckptguard.retention.trash import settle_trash
from ckptguard.runs.ended import ended_at
from ckptguard.runs.history import FOLDERS
from ckptguard.runs.lock import run_lock
from ckptguard.runs.not_understood import NotUnderstood
from ckptguard.runs.results import Checked
from ckptguard.runs.run_reader import RunMemory
from ckptguard.runs.run_view import Listing, RunView
from ckptguard.runs.work import PLAIN, Work, noted
from ckptguard.storage.local.removal import is_missing, own_removals
from ckptguard.upkeep.budget import SharedBudget, deeper, thinnable
from ckptguard.upkeep.finish_copies import finish_copies, looks_as_judged, protect, release_other, waiting_alone
from ckptguard.upkeep.leftovers import collect_leftovers
from ckptguard.upkeep.room import RoomNotes, leave_room, note_room
from ckptguard.upkeep.samples import (
    CheckpointSample,
    NotYet,
    PassStart,
    is_followed,
    not_yet,
    sample_of,
    wait_for_writers,
)
from ckptguard.upkeep.thin import thin
from ckptguard.values.ids import CheckpointId, Step, numbers_of
from ckptguard.values.packed_names import PackedNames, joined
from ckptguard.values.retention_policy import Policy
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import Resave, Verification, read_early, verify_checkpoint, verify_kept

_UPLOADS_INTERVAL = 86400.0  # seconds; a store lists unfinished uploads apart, and they are removed after a day
_COLLECT_INTERVAL = 3600.0  # seconds; files that are not old enough yet are removed next time
_THIN_AGAIN = 3600.0  # seconds after a problem with thinning
_PRUNE_INTERVAL = 600.0  # seconds; empties the trash and lifts pins even if nothing is saved
_GOING = 2.0  # seconds for which a run may be on its way out
_LONGEST_GOING = 10.0  # seconds after which a pass is made although records go on going
_COUNTED = tuple(f"{folder}/" for folder in (*FOLDERS, TRASH, PINS))  # what a pass reads besides the scrub plan

_PASSING = (f"{PINS}/", f"{SAMPLES}/", f"{SILENCES}/")  # they come and go while a run is used
_MARKED = 64  # steps of each series
_EARLY_EVERY = 8  # turns of a series

_BESIDE = (f"{INCIDENTS}/", f"{SCRUBS}/", f"{SAMPLES}/", f"{AUDIT}/", f"{EMPTIED}/", f"{LATE_MD5S}/", f"{SILENCES}/")


class PendingSave(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint without a verdict, and why it has none."""

    path: str
    series: str
    step: Step
    reason: str


class PassResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one pass. After `next_in` seconds a pending checkpoint may be ready. `could_not_tell` says what
    could not be read or written. The checkpoints concerned stay pending."""

    checked: tuple[Checked, ...] = ()
    pending: tuple[PendingSave, ...] = ()
    gone: tuple[str, ...] = ()
    late: PendingSave | None = None  # the newest save, if it is unfinished and has not changed for too long
    unverified: tuple[str, ...] = ()  # saves that went, or were saved over, and will have no verdict
    lost: str | None = None  # once per run: a checkpoint was gone before it could be verified, and what to do
    pruned: tuple[str, ...] = ()  # paths that the settings' policy removed
    thinned: tuple[str, ...] = ()  # paths whose state for a resume it removed
    could_not_tell: tuple[str, ...] = ()
    room: RoomProblem | None = None  # which kept copies the run lacks because there is no room
    short_of_room: bool = False  # the next saves of the runs on its file system may not fit
    not_understood: NotUnderstood | None = None  # files that may be state, and that nothing verifies
    unread: tuple[str, ...] = ()  # what nobody can look at: a folder, or a name that is not Unicode. A sentence each
    next_in: float | None = None
    ended_at: float | None = None  # only records are left: when they last changed, in seconds since 1970
    yielded: bool = False  # `work.may_begin` ended it early, so the next pass should follow


@dataclass
class PassNotes:
    """What is remembered about one run between passes, only to save work."""

    samples: dict[str, CheckpointSample] = field(default_factory=dict)
    gone: dict[str, float] = field(default_factory=dict)  # monotonic: since when paths were empty after their verdict
    uploads_at: float = 0.0  # monotonic: when to look for unfinished uploads, too
    collect_at: float = 0.0  # monotonic: when to look for leftovers of killed processes
    retry_after: dict[Where, float] = field(default_factory=dict)  # what could not be repaired, and when to try again
    prune_at: float = 0.0  # monotonic: when to prune although nothing new was verified
    thin_at: float = 0.0  # monotonic: when to thin again after a problem, for which whole weights were read
    never_thinned: dict[CheckpointId, str] = field(default_factory=dict)  # and why, by what their manifests say
    memory: RunMemory = field(default_factory=RunMemory)  # what the records said
    lost: dict[str, float] = field(default_factory=dict)  # paths that went without a verdict, and when (monotonic)
    lost_is_reported: bool = False
    room: RoomNotes = field(default_factory=RoomNotes)
    shared: SharedBudget | None = None  # of the fleet that the run is of
    empty_since: float | None = None  # monotonic: since when only records are left
    own_removals: int | None = None  # of records by this process, when the last pass started
    records_went: tuple[float, float] = (float("-inf"), float("-inf"))  # monotonic: first and last, without a pass
    waited: bool = False  # the last pass did nothing, because records went
    was_empty: bool = False  # no path held anything when the run was looked at before
    settled: PassStart | None = None  # what the last pass started from, if it left nothing to do
    start: PassStart | None = None  # what the last pass started from
    early_in: dict[str, int] = field(default_factory=dict)  # turns of a series until its newest save is read early

    def prune_is_due(self) -> bool:
        """True if pruning is due. The next time is then some minutes later."""
        now = time.monotonic()
        due = now >= self.prune_at
        self.prune_at = now + _PRUNE_INTERVAL if due else self.prune_at
        return due

    def note_start(self, start: PassStart, records: str | None) -> None:
        """Remember what a pass starts from, and whether others removed records on a local disk since the last one."""
        before, self.start = self.start, start
        own, self.own_removals = self.own_removals, None if records is None else own_removals(records)
        if before is None or own is None or own != self.own_removals:
            return
        if before.listed == start.listed:
            return
        gone = {*before.names, *before.beside} - {*start.names, *start.beside}
        if not all(name.startswith(_PASSING) for name in gone):
            now = time.monotonic()
            self.records_went = self.records_went[0] if self.waited else now, now

    def records_go(self, run: Run) -> bool:
        """True if records on a local disk have gone since the last pass started."""
        names: Iterable[str] = () if self.start is None or run.records.root is None else self.start.names
        return any(is_missing(run.records.path_of(name)) for name in names)

    def removal_may_last(self, settings: Settings) -> float:
        """Return for how many seconds the run may still be on its way out, because records went. 0: it stays.

        However often records go, a pass is made from time to time.
        """
        first, last = self.records_went
        return max(0.0, min(last + min(_GOING, settings.settle), first + _LONGEST_GOING) - time.monotonic())

    def nothing_to_do(self, start: PassStart) -> bool:
        """True if a pass with this start would do nothing, like the last one."""
        return start == self.settled and self.has_nothing_due(start.settings)

    def has_nothing_due(self, settings: Settings) -> bool:
        """True if a pass with these settings would do nothing, unless files or records changed since the last one."""
        settled = self.settled is not None and self.settled.settings == settings
        return settled and not self.lost and time.monotonic() < min(self.collect_at, self.prune_at)


def reconcile(view: RunView, notes: PassNotes, *, work: Work = PLAIN, assume_quiet: bool = False) -> PassResult:
    """Make one pass, and read the view again for it. `assume_quiet`: the trainer knows that its saves are finished. If
    neither files nor records changed since a pass that left nothing to do, it only makes two listings. Raises
    StorageError if the run cannot be listed. Problems with one checkpoint are part of the result."""
    view.memory = notes.memory
    start = start_of(view, notes.settled)
    notes.note_start(start, view.run.records.root)
    wait = 0.0 if assume_quiet else notes.removal_may_last(view.settings)
    notes.waited, listing = wait > 0, start.listing
    idle = PassResult(unread=listing.unread_notes, not_understood=listing.not_understood, room=notes.room.on_record)
    if notes.waited:
        notes.settled = None
        return msgspec.structs.replace(idle, next_in=wait)
    short, room_changed = notes.room.look(view.run) if notes.nothing_to_do(start) else (False, True)
    if not room_changed:
        notes.settled = start
        return msgspec.structs.replace(idle, short_of_room=short)
    notes.settled = None
    if not assume_quiet and (rest := _rest_of_removed(view, notes, start)) is not None:
        return rest
    one = _Pass(view, notes, work)
    one.clean_up(start)
    one.leave_room()
    ready = one.look(start, assume_quiet=assume_quiet)
    one.verify(ready)
    try:
        one.judge_copies()
        view.refresh(just_listed=not (ready or one.checked))
        one.troubles += finish_copies(view, work=work, saved_over=one.saved_over)
        one.leave_room()
        one.troubles += note_room(view, notes.room)
        if one.checked or notes.prune_is_due():
            one.repair_and_prune()
    except CouldNotTellError as error:
        if not one.checked:
            raise
        one.troubles.append(error.message)  # report the verdicts given so far: no later pass would
    done = one.result(start.listing)
    unsure = done.could_not_tell or any(entry.kind == "unread" for entry in start.listing.unread)
    if not done.pending and not unsure and not done.yielded and not one.marks_later:
        notes.settled = start
        if not start.listing.entries and not waiting_alone(view):
            done = msgspec.structs.replace(done, ended_at=ended_at(view))
    return done


def pass_read_only(view: RunView, notes: PassNotes) -> PassResult:
    """Note what is there and has a verdict, and write nothing: another daemon makes the passes. Raises
    CouldNotTellError."""
    notes.settled, notes.start = None, start_of(view, notes.start)
    for path in notes.samples.keys() - {checkpoint.path for checkpoint in view.checkpoints}:
        del notes.samples[path]
    pending = []
    for checkpoint in view.checkpoints:
        if checkpoint.unread is not None:
            pending.append(_unread_save(checkpoint))
            continue
        sample = sample_of(notes.samples, checkpoint)
        sample.early = None
        if _may_have_another_verdict(view, checkpoint, sample):
            sample.id = current_verdict_of(view, checkpoint)
            sample.done = sample.id is not None
        if not sample.done:
            pending.append(_pending(checkpoint, "another daemon verifies it"))
    return PassResult(
        pending=tuple(pending),
        unread=notes.start.listing.unread_notes,
        not_understood=notes.start.listing.not_understood,
    )


def _rest_of_removed(view: RunView, notes: PassNotes, start: PassStart) -> PassResult | None:
    """Return what a pass does while a run may be on its way out, which is nothing: only its records are left."""
    if start.listing.entries or not start.names:
        notes.empty_since = None
        return None
    gone, now = tuple(sorted(notes.samples)), time.monotonic()
    if gone and notes.empty_since is None:
        notes.empty_since = now
    wait = 0.0 if notes.empty_since is None else notes.empty_since + min(_GOING, view.settings.settle) - now
    return PassResult(next_in=wait) if wait > 0 and not waiting_alone(view) else None


class _Pass:
    """The state of one pass."""

    def __init__(self, view: RunView, notes: PassNotes, work: Work) -> None:
        self.view, self.notes, self.work = view, notes, work
        self.checked: list[Checked] = []
        self.pending: list[PendingSave] = []
        self.troubles: list[str] = []
        self.saved_over = False
        self._yielded = False
        self._gone: tuple[str, ...] = ()
        self._late: PendingSave | None = None
        self._replaced: list[str] = []  # paths
        self._marks: frozenset[str] = frozenset()  # the keys of marks of emptied paths
        self.marks_later = False  # files went a moment ago
        self._pruned: tuple[str, ...] = ()
        self._thinned: tuple[str, ...] = ()
        self._delays: list[float] = []

    def result(self, listing: Listing) -> PassResult:
        """Return what was done so far."""
        unverified = self._unverified()
        return PassResult(
            checked=tuple(self.checked),
            pending=tuple(self.pending),
            gone=self._gone,
            late=self._late,
            unverified=unverified,
            lost=self._lost(unverified),
            pruned=self._pruned,
            thinned=self._thinned,
            could_not_tell=tuple(dict.fromkeys(self.troubles)),
            room=self.notes.room.on_record,
            short_of_room=self.notes.room.missing > 0,
            unread=listing.unread_notes,
            not_understood=listing.not_understood,
            next_in=min(self._delays, default=None),
            yielded=self._yielded,
        )

    def _unverified(self) -> tuple[str, ...]:
        """Return what went without a verdict, once training has gone on since: of a run that was removed nothing is
        said. What waits as a kept copy still gets its verdict."""
        lost = self.notes.lost
        if not lost and not self._replaced:
            return ()
        judged = {one.path for one in self.checked}
        try:
            waiting = {copy.path for copy in waiting_alone(self.view)}
        except CouldNotTellError:
            return ()
        over = [path for path in self._replaced if path not in waiting | judged]
        for path in judged & lost.keys():
            del lost[path]
        late = time.monotonic() - min(_GOING, self.view.settings.settle)
        self._delays += [since - late for path, since in lost.items() if since > late]
        gone = [path for path, since in lost.items() if since <= late and path not in waiting]
        if not self.view.checkpoints:
            return ()
        for path in gone:
            del lost[path]
        return (*over, *gone)

    def _lost(self, unverified: tuple[str, ...]) -> str | None:
        """Say once what was lost, and what to do."""
        if not unverified or self.notes.lost_is_reported:
            return None
        self.notes.lost_is_reported = True
        return (
            f"{unverified[0]} was gone before it could be verified, and others may be, too: keep more checkpoints "
            "(save_total_limit), save less often, or set a smaller settle"
        )

    def clean_up(self, start: PassStart) -> None:
        """Finish or undo what killed processes began. Raises BusyError if another process holds the run."""
        view, notes = self.view, self.notes
        due = time.monotonic() >= notes.collect_at
        with run_lock(view.run):
            if start.has_unfinished_quarantines:
                finish_quarantines(view)
            if start.has_trash:
                with noted(self.troubles, "the trash could not be checked"):
                    settle_trash(view.run)
            if due:
                notes.collect_at = time.monotonic() + _COLLECT_INTERVAL
                uploads = time.monotonic() >= notes.uploads_at
                with noted(self.troubles, "leftovers of killed processes could not be removed"):
                    collect_leftovers(view, uploads=uploads)
                    notes.uploads_at = time.monotonic() + _UPLOADS_INTERVAL if uploads else notes.uploads_at
        if start.has_unfinished_quarantines or start.has_trash or due:
            view.forget()  # files may have been moved

    def leave_room(self) -> None:
        """Release what the next saves have no room beside."""
        self.troubles += leave_room(self.view, self.notes.room)

    def look(self, start: PassStart, *, assume_quiet: bool) -> list[Checkpoint]:
        """Find what can be verified now, and protect finished saves that have no verdict."""
        view, checkpoints = self.view, self.view.checkpoints
        newest = max(checkpoints, key=lambda c: c.written_at, default=None)
        self._note_what_went()
        self._marks = self._mark_emptied(start)
        # The copy of an older save takes the room of the next one, until a newer save has its verdict.
        hurry = self.notes.room.held and self.notes.room.missing > 0
        found: list[tuple[Checkpoint, NotYet | None]] = []
        failed: list[str] = []
        finished: list[tuple[Checkpoint, bool]] = []
        steps: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)  # of those that are protected, at least
        in_order = sorted(checkpoints, key=lambda c: (c.step is None, numbers_of(c.step), c.written_at, c.path))
        waiting = [checkpoint for checkpoint in in_order if self._lacks_verdict(checkpoint)]
        kept = 0 if view.settings.keep == "none" else view.settings.keep_pending
        for checkpoint in reversed(waiting):
            sample, known = self.notes.samples[checkpoint.path], False
            step, higher = numbers_of(checkpoint.step), steps[checkpoint.series]
            may_skip_look = not kept or (len(higher) >= kept and higher[kept - 1] > step)
            try:
                self._note_verdict(checkpoint, sample)
                known = view.current_if_readable(checkpoint) is not None
                self.saved_over = self.saved_over or (known and is_saved_over(view, checkpoint))
                waits = not_yet(
                    view,
                    checkpoint,
                    sample,
                    self.work,
                    assume_quiet=assume_quiet,
                    hurry=hurry,
                    may_skip_look=may_skip_look,
                )
            except CouldNotTellError as error:
                waits = NotYet(why=error.message, seconds=sample.retry_later(view.settings))
                failed.append(f"{checkpoint.path}: {error.message}")
            is_going = sample.judged and waits is not None  # it only lost files since its verdict
            if sample.is_finished and not is_going:
                # Quiet files, or those of a save before the next one, are a whole save, unless they are being
                # overwritten part by part.
                quiet = waits is None or is_followed(checkpoint, checkpoints)
                finished.append((checkpoint, sample.whole or (quiet and not known)))
                if not known or LAYOUTS[checkpoint.layout].sealed_by_writer:
                    higher.append(step)
            found.append((checkpoint, waits))
            if waits is not None and waits.unfinished and checkpoint is newest and not is_going:
                self._look_if_late(checkpoint, sample, waits)
        for checkpoint, waits in reversed(found):
            if waits is not None:
                self._wait(checkpoint, waits)
        self.troubles += [*reversed(failed), *protect(view, finished)]
        return [checkpoint for checkpoint, waits in reversed(found) if waits is None]

    def _lacks_verdict(self, checkpoint: Checkpoint) -> bool:
        """True if a checkpoint that can be looked at may have no verdict."""
        if checkpoint.unread is not None:  # what was known of it stays, and counts again once it can be read
            self.pending.append(_unread_save(checkpoint))
            return False
        sample = sample_of(self.notes.samples, checkpoint)
        with contextlib.suppress(CouldNotTellError):  # `look` says so
            self._note_verdict(checkpoint, sample)
        return not sample.done

    def _note_verdict(self, checkpoint: Checkpoint, sample: CheckpointSample) -> None:
        if _may_have_another_verdict(self.view, checkpoint, sample):
            sample.id = current_verdict_of(self.view, checkpoint)
            sample.done = sample.id is not None and not self._was_empty(checkpoint.path, sample.id)
            sample.early = None if sample.done else sample.early

    def _note_what_went(self) -> None:
        """Note which paths are empty now, and which hold another save before the one there had its verdict."""
        notes, checkpoints = self.notes, self.view.checkpoints
        closed = tuple(f"{entry.key}/" for entry in self.view.listing.unread)  # what is below may be there
        lacking = set(notes.samples) - {c.path for c in checkpoints}
        self._gone = tuple(sorted(path for path in lacking if not path.startswith(closed)))
        samples = {path: notes.samples.pop(path) for path in self._gone}
        unjudged = sorted(path for path, sample in samples.items() if not (sample.done or sample.judged))
        notes.lost.update(dict.fromkeys(unjudged, time.monotonic()))
        notes.gone.update(dict.fromkeys(self._gone, time.monotonic()))
        before = {c.path: notes.samples.get(c.path) for c in checkpoints}
        self._replaced = [c.path for c in checkpoints if (s := before[c.path]) and s.was_saved_over(c.signature)]
        if notes.was_empty:
            notes.gone.update({c.path: float("-inf") for c in checkpoints})
            notes.was_empty = False

    def _look_if_late(self, checkpoint: Checkpoint, sample: CheckpointSample, waits: NotYet) -> None:
        """Note that the newest save is unfinished, and was not written for two of the usual times between saves."""
        listed = self.view.listing.series.items()
        left = late_in(sample.stable_for(checkpoint), shortest_interval({name: own.saved_at for name, own in listed}))
        if left is not None and left > 0:
            self._delays.append(left)
        elif left is not None:
            self._late = _pending(checkpoint, waits.why)

    def _mark_emptied(self, start: PassStart) -> frozenset[str]:
        """Mark judged checkpoints whose paths are empty, among the newest steps of each series. Returns the keys of the
        marks before. While files go, the run may be on its way out, and nothing is created in it."""
        marks = frozenset(name for name in start.beside if name.startswith(f"{EMPTIED}/"))
        last = max(self.notes.gone.values(), default=None)
        wait = 0.0 if last is None else last + min(_GOING, self.view.settings.settle) - time.monotonic()
        if wait > 0:
            self.marks_later = True
            self._delays.append(wait)
            return marks
        history, there = self.view.history, {(c.series, c.step) for c in self.view.checkpoints}
        unread = tuple(f"{entry.key}/" for entry in start.listing.unread)
        for series in history.names:
            if series.startswith(unread):
                continue  # nobody knows what is there
            judged = sorted(history.current_verdicts(series).values(), key=lambda s: s.id.order)[-_MARKED:]
            for current_verdict in {s.id.step: s for s in judged}.values():
                is_there = (series, current_verdict.id.step) in there or history.is_quarantined(current_verdict.id)
                if is_there or emptied_key(current_verdict) in marks:
                    continue
                with noted(self.troubles, f"{current_verdict.id} of {series} could not be marked as gone"):
                    mark_emptied(self.view.run, current_verdict)
        return marks

    def _was_empty(self, path: str, id: CheckpointId) -> bool:
        """True if a path was seen empty since its verdict: a new file may have the size, time and inode of the old."""
        if path in self.notes.gone:
            return True
        current_verdict = self.view.history.current_verdict(id) if self._marks else None
        return current_verdict is not None and emptied_key(current_verdict) in self._marks

    def _unmark_emptied(self, id: CheckpointId | None) -> None:
        """Remove the mark of a generation whose own files are in place again."""
        current_verdict = self.view.history.current_verdict(id) if id is not None and self._marks else None
        if current_verdict is not None and emptied_key(current_verdict) in self._marks:
            unmark_emptied(self.view.run, current_verdict)

    def verify(self, ready: Sequence[Checkpoint]) -> None:
        """Verify what is ready, oldest first, until the work is stopped or yields to other runs. After the first one of
        a series its newest is read before its turn, because a resume would take it."""
        newest = _newest_of_own_step(ready, self.view.checkpoints)
        for checkpoint in ready:
            last = newest.get(checkpoint.series, checkpoint)
            if last is not checkpoint and self.notes.early_in.get(checkpoint.series) == 0:
                self._read_early(last)
            sample = self.notes.samples[checkpoint.path]
            if sample.done:
                continue
            if self.work.is_stopped():
                self._wait_for_turn(checkpoint, NotYet(why="the daemon is stopping", seconds=None))
                continue
            if self._should_yield(checkpoint.bytes):
                self._wait_for_turn(checkpoint, NotYet(why="other runs go first", seconds=0.0))
                continue
            was_gone = checkpoint.path in self.notes.gone
            work = self._patient(checkpoint, time.monotonic() - sample.since)
            result = _verify(self.view, checkpoint, sample, work, was_gone=was_gone)
            self.notes.early_in[checkpoint.series] = max(0, self.notes.early_in.get(checkpoint.series, 1) - 1)
            if isinstance(result, Checked):
                self._judged(checkpoint, result)
                continue
            self.view.look_again(checkpoint.path)
            self._wait(checkpoint, NotYet(why=result, seconds=max(0.0, sample.retry_at - time.monotonic())))
            if sample.failures:
                self.troubles.append(f"{checkpoint.path}: {result}")

    def _read_early(self, checkpoint: Checkpoint) -> None:
        """Read the newest save of a series while earlier ones wait. It has its verdict at once if its own bytes make it
        bad. Then older saves have some turns, so that a training that saves fast does not hold them up: what was read
        early is read again if our own link to it went meanwhile, because that changes its ctime."""
        sample = self.notes.samples[checkpoint.path]
        if sample.done or sample.early is not None or sample.retry_at > time.monotonic():
            return
        if self.work.is_stopped() or self._should_yield(checkpoint.bytes):
            return
        id = self.view.current_if_readable(checkpoint)
        if id is not None and self.view.history.has_verdict(id):  # a new save, or damage: its turn decides
            return
        self.notes.early_in[checkpoint.series] = _EARLY_EVERY
        work = self._patient(checkpoint, time.monotonic() - sample.since)
        try:
            result = read_early(self.view, checkpoint, was_gone=checkpoint.path in self.notes.gone, work=work)
        except CouldNotTellError as error:  # its turn tries again, and says so
            _note_failure(sample, error, self.view.settings)
            return
        if isinstance(result, Checked):
            sample.done, sample.id = True, result.id
            self._judged(checkpoint, result)
        else:
            sample.early = result
            self.work.on_early(checkpoint, result.words)

    def _judged(self, checkpoint: Checkpoint, result: Checked) -> None:
        """Do what follows from the verdict on a checkpoint in place."""
        self.notes.gone.pop(checkpoint.path, None)
        self._unmark_emptied(result.id)
        self._found(result)
        self.troubles += release_other(self.view, checkpoint, result.id)
        self._settle_first_good(result)
        self.leave_room()

    def judge_copies(self) -> None:
        """Verify kept copies whose saves were deleted or overwritten, the newest first."""
        for copy in waiting_alone(self.view):
            if self.work.is_stopped() or self._should_yield(copy.bytes):
                return
            result = None
            with noted(self.troubles, f"the kept copy of {copy.path}"):
                result = verify_kept(self.view, copy, work=self._patient(copy, 0.0))
            if result is not None:
                self._found(result)
                self._settle_first_good(result)

    def _found(self, result: Checked) -> None:
        self.checked.append(result)
        self.work.on_verdict(result)

    def _should_yield(self, size: int) -> bool:
        """True once the pass must not begin to read this number of bytes. It then begins nothing smaller, either."""
        self._yielded = self._yielded or not self.work.may_begin(size)
        return self._yielded

    def _patient(self, one: Checkpoint | KeptCopy, waited: float) -> Work:
        """Return the work for one verdict: it yields to training until the verdict is late."""
        own = self.view.listing.series.get(one.series)
        return msgspec.structs.replace(
            self.work, yield_for=may_yield_for(waited, save_interval(own.saved_at if own else ()))
        )

    def _settle_first_good(self, result: Checked) -> None:
        """Make a full copy of the only good checkpoint of a series before anything else is read."""
        steps = self.view.history.steps(result.series)
        good = (s for step in steps for s in step.current_verdicts.values() if s.outcome is Outcome.GOOD)
        if result.outcome is Outcome.GOOD and len(list(islice(good, 2))) == 1:
            try:
                self.troubles += finish_copies(self.view, work=self.work, saved_over=self.saved_over)
            except CouldNotTellError as error:
                self.troubles.append(error.message)  # the end of the pass tries again

    def repair_and_prune(self) -> None:
        """Make the automatic repairs, and remove what the settings do not keep."""
        repaired = repair_automatically(self.view, self.notes.retry_after, work=self.work)
        for result in repaired.checked:
            self._found(result)
        policy, may_thin = self.view.settings.retention(), time.monotonic() >= self.notes.thin_at
        if self.notes.shared is not None:
            policy = self.notes.shared.policy_for(self.view.run.url, policy)
        will_thin: WillThin = {}
        troubles = list[str]()
        with noted(troubles, "nothing was pruned"):  # what cannot be thinned right now is not pruned for that
            will_thin = thinnable(self.view, policy, self.notes.never_thinned)
        budget = None
        if not troubles:
            self._pruned, budget, troubles = prune_by_settings(self.view, policy, will_thin=will_thin)
        self.troubles += [*repaired.could_not_tell, *troubles]
        if self.notes.shared is not None and budget is not None:
            self.notes.shared.note(self.view.run.url, budget.after)
        if not troubles and may_thin:
            self._thin(policy, budget)

    def _thin(self, policy: Policy, budget: Budget | None) -> None:
        """Thin one checkpoint that the budget names, or else the policy. The next pass follows at once: new saves come
        before old ones."""
        begun, wanted = False, frozenset(() if budget is None else budget.to_thin)
        policy = deeper(policy) if wanted else policy

        def may_begin(size: int) -> bool:
            nonlocal begun
            if begun or self._should_yield(size):
                self._yielded, self.notes.prune_at = True, 0.0
                return False
            begun = True
            return True

        work = msgspec.structs.replace(self.work, may_begin=may_begin, yield_for=may_yield_for(0.0, None))
        thinned, troubles = thin(
            self.view,
            policy,
            work=work,
            refused=self.notes.never_thinned,
            only=lambda one: not wanted or one.path in wanted,
        )
        self._thinned = tuple(one.path for one in thinned if one.files)
        self.notes.thin_at = time.monotonic() + _THIN_AGAIN if troubles else 0.0
        self.troubles += troubles

    def _wait_for_turn(self, checkpoint: Checkpoint, waits: NotYet) -> None:
        early = self.notes.samples[checkpoint.path].early
        self._wait(checkpoint, waits if early is None else msgspec.structs.replace(waits, why=early.words))

    def _wait(self, checkpoint: Checkpoint, waits: NotYet) -> None:
        self.pending.append(_pending(checkpoint, waits.why))
        self._delays += [] if waits.seconds is None else [waits.seconds]


def start_of(view: RunView, before: PassStart | None) -> PassStart:
    """List a run's files and the names of its records. What did not change since `before` is not worked out again.

    Raises StorageError.
    """
    listed = record_names(view.run, "")
    view.forget()
    digest = hashlib.blake2b(joined(listed), digest_size=16).digest()
    if before is not None and before.listed == digest:
        return replace(before, listing=view.list_after(before.listing), settings=view.settings)
    names = PackedNames(name for name in listed if name.startswith(_COUNTED))
    listing = view.list_after(before.listing if before is not None and before.names == names else None)
    return PassStart(
        listing=listing,
        names=names,
        settings=view.settings,
        beside=PackedNames(name for name in listed if name.startswith(_BESIDE)),
        listed=digest,
        has_trainings=any(name.startswith(f"{TRAININGS}/") for name in listed),
    )


def _newest_of_own_step(ready: Sequence[Checkpoint], every: Iterable[Checkpoint]) -> dict[str, Checkpoint]:
    """Return the newest checkpoint of each series that is ready, unless it has no step, or shares it with another one
    of `every`: these are ordered as they are sealed."""
    of_step = Counter((checkpoint.series, checkpoint.step) for checkpoint in every)
    newest = {checkpoint.series: checkpoint for checkpoint in ready}
    return {s: c for s, c in newest.items() if c.step is not None and of_step[s, c.step] == 1}


def _unread_save(checkpoint: Checkpoint) -> PendingSave:
    """Return why a checkpoint has no verdict now: nobody can look into a folder of it."""
    return _pending(checkpoint, f"it could not be read: {checkpoint.unread}")


def _pending(checkpoint: Checkpoint, why: str) -> PendingSave:
    return PendingSave(path=checkpoint.path, series=checkpoint.series, step=checkpoint.step, reason=why)


def _verify(
    view: RunView, checkpoint: Checkpoint, sample: CheckpointSample, work: Work, *, was_gone: bool
) -> Checked | str:
    """Return the verdict, or why there is none. Then `sample` says when to try again."""
    waits = sample.resaving is None and sample.stable_for(checkpoint) < view.settings.unfinished_limit
    how = Verification(resave=Resave.WAIT if waits else Resave.GIVE_UP, was_gone=was_gone)
    try:
        try:
            result = verify_checkpoint(view, checkpoint, how, work=work, early=sample.early)
        except ResavingError as error:  # from now on it is unfinished, until a file changes
            sample.resaving = error.message
            if wait_for_writers(view, checkpoint, sample) > 0:
                raise
            how = msgspec.structs.replace(how, resave=Resave.GIVE_UP)
            result = verify_checkpoint(view, checkpoint, how, work=work, early=sample.early)
    except ResavingError as error:
        return error.message
    except CouldNotTellError as error:
        _note_failure(sample, error, view.settings)
        return error.message
    sample.done, sample.id, sample.early = True, result.id, None
    return result


def _may_have_another_verdict(view: RunView, checkpoint: Checkpoint, sample: CheckpointSample) -> bool:
    """True if it has none yet, or its bytes were sealed again since, as a `reseal` does: that changes no file."""
    newest = view.history.newest_sealed(checkpoint.series, checkpoint.step)
    again = sample.id is not None and newest > max(sample.newest, sample.id.generation)
    sample.newest = newest
    return again or not sample.done


def _note_failure(sample: CheckpointSample, error: CouldNotTellError, settings: Settings) -> None:
    """Note when to try again to read a checkpoint."""
    if isinstance(error, (ChangedWhileReadError, ObjectMissingError)):
        sample.retry_at = time.monotonic() + settings.settle
    else:
        sample.retry_later(settings)


def current_verdict_of(view: RunView, checkpoint: Checkpoint) -> CheckpointId | None:
    """Return the generation with a verdict on exactly these files, as far as storage reports sizes, times and
    inodes."""
    id = view.current(checkpoint)
    if id is None or not view.history.has_verdict(id):
        return None
    manifest = view.history.manifest(id)
    same_files = manifest is not None and set(checkpoint.files) == {f.path for f in manifest.files}
    return id if same_files and looks_as_judged(view, checkpoint, id) else None
