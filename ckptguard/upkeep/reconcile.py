"""Reconcile: one pass over a run. Find finished saves, protect them, verify them, promote or release their copies.

The daemon, ``--once`` and the guard only loop over this. Storage is the truth: nothing here relies on having seen an
event, and a pass that is killed at any point is simply made again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from ckptguard.errors import BusyError, ChangedWhileReadError, CouldNotTellError, ObjectMissingError, ResavingError
from ckptguard.keep.copies import is_saved_over
from ckptguard.keep.quarantine import finish_quarantines
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.names_by_step import FOLDERS
from ckptguard.records.pins import FOLDER as PINS
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import record_names
from ckptguard.records.scrubs import Where
from ckptguard.records.trash import FOLDER as TRASH
from ckptguard.repair.repair import mend
from ckptguard.retention.prune import Remembered, prune_by_settings
from ckptguard.retention.trash import settle_trash
from ckptguard.runs.lock import run_lock
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import Listing, RunView
from ckptguard.runs.settling import youngest_age
from ckptguard.runs.work import PLAIN, Work
from ckptguard.upkeep.leftovers import collect_leftovers
from ckptguard.upkeep.settle_kept import looks_as_judged, protect, release_other, settle_kept, waiting_alone
from ckptguard.values.ids import Step, numbers_of
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import Resave, Verification, verify_checkpoint
from ckptguard.verification.collect_evidence import completeness
from ckptguard.verification.kept_copy import verify_kept

_COLLECT_INTERVAL = 3600.0  # seconds; what is not old yet is at the next look
_PRUNE_INTERVAL = 600.0  # seconds; the trash is emptied, and pins are lifted, without anything being saved
_LONGEST_PAUSE = 3600.0  # seconds between two tries to read what cannot be read
_COUNTED = tuple(f"{folder}/" for folder in (*FOLDERS, TRASH, PINS))  # what a pass looks at, but for what is due


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint without a verdict, and why."""

    path: str
    series: str
    step: Step
    reason: str


class PassResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass did. `next_in`: seconds after which a pending checkpoint may be ready. `could_not_tell` are
    sentences about what could not be read or written; everything concerned stays pending."""

    checked: tuple[Checked, ...] = ()
    pending: tuple[Waiting, ...] = ()
    gone: tuple[str, ...] = ()
    lost: str | None = None  # once a run: one was gone before it could be verified, and what to do about it
    pruned: tuple[str, ...] = ()  # paths that the settings' policy did not keep
    could_not_tell: tuple[str, ...] = ()
    next_in: float | None = None


@dataclass(frozen=True)
class Start:
    """What a pass begins from. Two that are equal mean: nothing that a pass goes by has changed."""

    listing: Listing  # the same one while no entry differs
    names: frozenset[str]
    settings: Settings

    @cached_property
    def has_trash(self) -> bool:
        """True if anything lies in the trash."""
        return any(name.startswith(f"{TRASH}/") for name in self.names)

    @cached_property
    def has_unfinished_quarantines(self) -> bool:
        """True if a checkpoint was marked to be moved aside, and not that it was moved."""
        own = [name for name in self.names if name.startswith(f"{QUARANTINE}/") and name.count("/") == 2]
        moved = {name.removesuffix(".moved") for name in own if name.endswith(".moved")}
        return any(name.removesuffix(".json") not in moved for name in own if name.endswith(".json"))


@dataclass
class CheckpointSample:
    """A checkpoint as storage showed it, since when, and what was found out about it since."""

    signature: tuple[tuple[object, ...], ...]
    since: float  # monotonic: when this signature was first seen
    unfinished: str | None = None  # why, as of this signature
    looked: bool = False  # `unfinished` was computed
    whole: bool = False  # so were all of its files: its layout proves it
    done: bool = False  # a verdict stands for this signature
    retry_at: float = 0.0
    failures: int = 0

    @property
    def is_finished(self) -> bool:
        """True if it was looked at and found to be finished."""
        return self.looked and self.unfinished is None

    def stable_for(self, checkpoint: Checkpoint) -> float:
        """For how many seconds its files have been as they are."""
        return max(time.monotonic() - self.since, youngest_age(checkpoint) or 0.0)

    def retry_later(self, settings: Settings) -> float:
        """Note a failure to read; returns the seconds until the next try, which grow."""
        self.failures += 1
        pause = min(settings.scan_interval * 2.0 ** min(self.failures, 12), _LONGEST_PAUSE)
        self.retry_at = time.monotonic() + pause
        return pause


class NotYet(msgspec.Struct, frozen=True, kw_only=True):
    """Why a checkpoint cannot be verified yet, and the seconds until that may change (None: no time will tell)."""

    why: str
    seconds: float | None


@dataclass
class PassNotes:
    """Notes about one run between passes. They only save work: losing them loses nothing."""

    samples: dict[str, CheckpointSample] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)  # places that were seen empty since what lay there was judged
    collect_at: float = 0.0  # monotonic: when leftovers of killed processes are looked for
    hopeless: dict[Where, float] = field(default_factory=dict)  # what could not be repaired, and until when to wait
    prune_at: float = 0.0  # monotonic: when pruning is due although nothing new was verified
    remembered: Remembered = field(default_factory=Remembered)  # what retention has read
    told_of_lost: bool = False
    settled: Start | None = None  # what the last pass began from, if it left nothing to be done

    def prune_is_due(self) -> bool:
        """True if it is; the next time is some minutes away."""
        now = time.monotonic()
        due = now >= self.prune_at
        self.prune_at = now + _PRUNE_INTERVAL if due else self.prune_at
        return due

    def forget(self, path: str) -> None:
        """Have a checkpoint read again in the next pass."""
        self.samples.pop(path, None)
        self.settled = None

    def nothing_to_do(self, start: Start) -> bool:
        """True if a pass that begins so would do what the last one did: nothing more."""
        return start == self.settled and time.monotonic() < min(self.collect_at, self.prune_at)


def reconcile(view: RunView, notes: PassNotes, *, work: Work = PLAIN, assume_quiet: bool = False) -> PassResult:
    """Make one pass, by a view that is read anew. `assume_quiet` is for a trainer that knows its saves are finished.
    Where neither files nor records changed since a pass that left nothing to be done, one listing of each is all.
    StorageError if the run cannot be listed; trouble with one checkpoint is told in the answer."""
    start = _start_of(view, notes.settled)
    if notes.nothing_to_do(start):
        return PassResult()
    notes.settled = None
    one = _Pass(view, notes, work)
    one.clean_up(start)
    one.verify(one.look(assume_quiet=assume_quiet))
    try:
        one.judge_copies()
        view.refresh()
        one.troubles += settle_kept(view, work=work, saved_over=one.saved_over)
        if one.checked or notes.prune_is_due():
            one.mend_and_prune()
    except CouldNotTellError as error:
        if not one.checked:
            raise
        one.troubles.append(error.message)  # what was judged is told all the same: no later pass would
    if not one.pending and not one.troubles:
        notes.settled = start
    return one.result()


class _Pass:
    """One pass, while it is made."""

    def __init__(self, view: RunView, notes: PassNotes, work: Work) -> None:
        self.view, self.notes, self.work = view, notes, work
        self.checked: list[Checked] = []
        self.pending: list[Waiting] = []
        self.troubles: list[str] = []
        self.saved_over = False
        self._gone: tuple[str, ...] = ()
        self._unjudged: set[str] = set()  # of these, the ones without a verdict
        self._pruned: tuple[str, ...] = ()
        self._delays: list[float] = []

    def result(self) -> PassResult:
        """What was done so far."""
        return PassResult(
            checked=tuple(self.checked),
            pending=tuple(self.pending),
            gone=self._gone,
            lost=self._lost(),
            pruned=self._pruned,
            could_not_tell=tuple(dict.fromkeys(self.troubles)),
            next_in=min(self._delays, default=None),
        )

    def _lost(self) -> str | None:
        judged = {one.path for one in self.checked}
        lost = next((path for path in sorted(self._unjudged - judged)), None)
        if lost is None or self.notes.told_of_lost:
            return None
        self.notes.told_of_lost = True
        return (
            f"{lost} was gone before it could be verified, and so may others be: keep more of them in place "
            "(save_total_limit), save less often, or set a smaller settle"
        )

    def clean_up(self, start: Start) -> None:
        """Finish or undo what killed processes began. BusyError if another process holds the run."""
        view, notes = self.view, self.notes
        due = time.monotonic() >= notes.collect_at
        with run_lock(view.run):
            if start.has_unfinished_quarantines:
                finish_quarantines(view)
            if start.has_trash:
                try:
                    settle_trash(view.run)
                except CouldNotTellError as error:
                    self.troubles.append(f"the trash could not be looked after: {error.message}")
            if due:
                notes.collect_at = time.monotonic() + _COLLECT_INTERVAL
                try:
                    collect_leftovers(view)
                except CouldNotTellError as error:
                    self.troubles.append(f"what killed processes left could not be collected: {error.message}")
        if start.has_unfinished_quarantines or start.has_trash or due:
            view.forget()  # files may have been moved

    def look(self, *, assume_quiet: bool) -> list[Checkpoint]:
        """Find what can be verified now, and protect what is finished and has no verdict."""
        view, checkpoints = self.view, self.view.checkpoints
        self._gone = tuple(sorted(set(self.notes.samples) - {c.path for c in checkpoints}))
        self._unjudged = {path for path in self._gone if not self.notes.samples.pop(path).done}
        self.notes.gone.update(self._gone)
        ready: list[Checkpoint] = []
        finished: list[tuple[Checkpoint, bool]] = []
        in_order = sorted(checkpoints, key=lambda c: (c.step is None, numbers_of(c.step), c.written_at, c.path))
        for checkpoint in in_order:
            sample, known = _sample(self.notes, checkpoint), False
            try:
                if sample.done or _stands(view, checkpoint):
                    sample.done = True
                    continue
                known = view.current_if_readable(checkpoint) is not None
                self.saved_over = self.saved_over or (known and is_saved_over(view, checkpoint))
                waits = _not_yet(view, checkpoint, sample, self.work, assume_quiet=assume_quiet)
            except CouldNotTellError as error:
                waits = NotYet(why=error.message, seconds=sample.retry_later(view.settings))
                self.troubles.append(f"{checkpoint.path}: {error.message}")
            if sample.is_finished:
                # Quiet files are a whole save, but for one that is being saved over, part by part.
                finished.append((checkpoint, sample.whole or (waits is None and not known)))
            if waits is None:
                ready.append(checkpoint)
            else:
                self._wait(checkpoint, waits)
        self.troubles += protect(view, finished)
        return ready

    def verify(self, ready: Iterable[Checkpoint]) -> None:
        """Verify what is ready, oldest first, until the work is stopped."""
        for checkpoint in ready:
            if self.work.is_stopped():
                self._wait(checkpoint, NotYet(why="the daemon is stopping", seconds=None))
                continue
            sample = self.notes.samples[checkpoint.path]
            was_gone = checkpoint.path in self.notes.gone
            result = _verify(self.view, checkpoint, sample, self.work, was_gone=was_gone)
            if isinstance(result, Checked):
                self.notes.gone.discard(checkpoint.path)
                self.checked.append(result)
                self.troubles += release_other(self.view, checkpoint, result.id)
                self._settle_first_good(result)
                continue
            self.view.look_again(checkpoint.path)
            self._wait(checkpoint, NotYet(why=result, seconds=max(0.0, sample.retry_at - time.monotonic())))
            if sample.failures:
                self.troubles.append(f"{checkpoint.path}: {result}")

    def judge_copies(self) -> None:
        """Judge kept copies by themselves whose saves were rotated away or saved over, the newest first."""
        for copy in waiting_alone(self.view):
            if self.work.is_stopped():
                return
            try:
                result = verify_kept(self.view, copy, work=self.work)
            except (BusyError, CouldNotTellError) as error:
                self.troubles.append(f"the kept copy of {copy.path}: {error.message}")
            else:
                if result is not None:
                    self.checked.append(result)
                    self._settle_first_good(result)

    def _settle_first_good(self, result: Checked) -> None:
        """Give the only good one of a series bytes of its own before anything else is read: there is no other."""
        standings = self.view.history.standings(result.series).values()
        if result.outcome is Outcome.GOOD and sum(s.outcome is Outcome.GOOD for s in standings) == 1:
            try:
                self.troubles += settle_kept(self.view, work=self.work, saved_over=self.saved_over)
            except CouldNotTellError as error:
                self.troubles.append(error.message)  # the end of the pass tries again

    def mend_and_prune(self) -> None:
        """Repair what can be repaired unasked, and remove what the settings do not keep."""
        mended = mend(self.view, self.notes.hopeless, work=self.work)
        self.checked += mended.checked
        self._pruned, troubles = prune_by_settings(self.view, self.notes.remembered)
        self.troubles += [*mended.could_not_tell, *troubles]

    def _wait(self, checkpoint: Checkpoint, waits: NotYet) -> None:
        path, series, step = checkpoint.path, checkpoint.series, checkpoint.step
        self.pending.append(Waiting(path=path, series=series, step=step, reason=waits.why))
        self._delays += [] if waits.seconds is None else [waits.seconds]


def _start_of(view: RunView, before: Start | None) -> Start:
    """Look at a run anew, by one listing of its files and one of its records' names. StorageError."""
    names = frozenset(name for name in record_names(view.run, "") if name.startswith(_COUNTED))
    view.forget()
    listing = view.list_after(before.listing if before is not None and before.names == names else None)
    return Start(listing=listing, names=names, settings=view.settings)


def _sample(notes: PassNotes, checkpoint: Checkpoint) -> CheckpointSample:
    sample = notes.samples.get(checkpoint.path)
    if sample is None or sample.signature != checkpoint.signature:
        sample = CheckpointSample(signature=checkpoint.signature, since=time.monotonic())
        notes.samples[checkpoint.path] = sample
    return sample


def _verify(
    view: RunView, checkpoint: Checkpoint, sample: CheckpointSample, work: Work, *, was_gone: bool
) -> Checked | str:
    """The verdict that was given; or why there is none, and `sample` says when to try again."""
    left = view.settings.unfinished_limit - sample.stable_for(checkpoint)
    how = Verification(resave=Resave.WAIT if left > 0 else Resave.GIVE_UP, was_gone=was_gone)
    try:
        result = verify_checkpoint(view, checkpoint, how, work=work)
    except ResavingError as error:
        # A new look is due when a file changes (then there is a new sample), or when patience ends.
        sample.retry_at = time.monotonic() + left
        return error.message
    except (ChangedWhileReadError, ObjectMissingError) as error:
        sample.retry_at = time.monotonic() + view.settings.settle
        return error.message
    except CouldNotTellError as error:
        sample.retry_later(view.settings)
        return error.message
    sample.done = True
    return result


def _stands(view: RunView, checkpoint: Checkpoint) -> bool:
    """True if a verdict stands for exactly these files, as far as storage reports: sizes, times and inodes."""
    id = view.current(checkpoint)
    if id is None or not view.history.has_verdict(id):
        return False
    manifest = view.history.manifest(id)
    same_files = manifest is not None and set(checkpoint.files) == {f.path for f in manifest.files}
    return same_files and looks_as_judged(view, checkpoint, id)


def _not_yet(
    view: RunView, checkpoint: Checkpoint, sample: CheckpointSample, work: Work, *, assume_quiet: bool
) -> NotYet | None:
    """Why a checkpoint cannot be verified yet; None when it can. CouldNotTellError if that cannot be told."""
    now = time.monotonic()
    if sample.retry_at > now:
        return NotYet(why="it could not be read; trying again", seconds=sample.retry_at - now)
    stable = sample.stable_for(checkpoint)
    if not sample.looked:
        sample.unfinished, sample.whole = completeness(view.run.storage, checkpoint, scanner=work.scanner)
        sample.looked = True
    sealed = view.current(checkpoint)
    by_writer = LAYOUTS[checkpoint.layout].sealed_by_writer
    why = sample.unfinished
    if why is None and sealed is None and by_writer:
        why = "its writer has not sealed it"
        sample.looked = False  # the seal changes no file
    if why is not None:
        left = view.settings.unfinished_limit - stable
        return NotYet(why=why, seconds=left) if left > 0 else None
    if stable < view.settings.settle and not assume_quiet and not (by_writer and sealed is not None):
        return NotYet(why="it was written just now", seconds=view.settings.settle - stable)
    return None
