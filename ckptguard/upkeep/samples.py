"""What a pass starts from, what is remembered of a checkpoint until it has its verdict, and when it can get it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from ckptguard.decisions.fleet_health import usual_pause
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.trash import FOLDER as TRASH
from ckptguard.runs.run_view import Listing, RunView
from ckptguard.runs.settling import youngest_age
from ckptguard.runs.work import Work
from ckptguard.runs.writers import pause_between_files, writer_of, writers_are_seen
from ckptguard.values.ids import CheckpointId, numbers_of
from ckptguard.values.packed_names import PackedNames
from ckptguard.values.settings import Settings
from ckptguard.verification.checkpoint import EarlyRead
from ckptguard.verification.collect_evidence import completeness

_COMPARED = 8  # earlier saves of a series that say how long its writer pauses
_LONGEST_PAUSE = 3600.0  # seconds between two attempts to read an unreadable checkpoint


@dataclass(frozen=True)
class PassStart:
    """What a pass starts from. If two are equal, nothing that a pass depends on has changed."""

    listing: Listing  # the same object while no entry differs
    names: PackedNames
    settings: Settings
    beside: PackedNames = field(default=PackedNames(), compare=False)  # other records, on which no pass depends
    listed: bytes = field(default=b"", compare=False)  # the digest of the names of all records
    has_trainings: bool = field(default=False, compare=False)  # records of processes that train

    @cached_property
    def has_trash(self) -> bool:
        """True if the trash is not empty."""
        return any(name.startswith(f"{TRASH}/") for name in self.names)

    @cached_property
    def has_unfinished_quarantines(self) -> bool:
        """True if a checkpoint was marked to be moved aside, but not yet marked as moved."""
        own = [name for name in self.names if name.startswith(f"{QUARANTINE}/") and name.count("/") == 2]
        moved = {name.removesuffix(".moved") for name in own if name.endswith(".moved")}
        return any(name.removesuffix(".json") not in moved for name in own if name.endswith(".json"))


@dataclass
class CheckpointSample:
    """A checkpoint's state in storage, since when it has it, and what was learned about it since."""

    signature: tuple[tuple[object, ...], ...]
    since: float  # monotonic: when this signature was first seen
    unfinished: str | None = None  # why it is unfinished, at this signature
    resaving: str | None = None  # some of its files were saved again, and others not: so it is unfinished, too
    looked: bool = False  # `unfinished` was computed
    whole: bool = False  # its layout proves that all of its files exist
    old: bool = False  # nothing can write it any more: it is judged without a look
    done: bool = False  # there is a verdict for this signature
    id: CheckpointId | None = None  # the generation that this verdict is about
    newest: int = 0  # the newest sealed generation of its step, when `id` was looked for
    early: EarlyRead | None = None  # it was read before its turn
    retry_at: float = 0.0
    failures: int = 0
    judged: bool = False  # it had its verdict, and since then only lost files

    def was_saved_over(self, signature: tuple[tuple[object, ...], ...]) -> bool:
        """True if another save took its place before its verdict, and it does not just go on: it was provably whole, or
        old, or its only file was replaced by another one."""
        now = {key: rest for key, *rest in signature}
        over = [(rest, now[key]) for key, *rest in self.signature if now.get(key, rest) != rest]
        if not over or not (self.looked or self.old) or self.done or self.judged:
            return False
        inodes = {one[2] for one in over[0]}
        is_other_file = len(self.signature) == len(now) == 1 and len(inodes) == 2 and None not in inodes
        return self.whole or self.old or is_other_file

    @property
    def is_unfinished(self) -> bool:
        """True if a part of it is missing."""
        return self.unfinished is not None or self.resaving is not None

    @property
    def is_finished(self) -> bool:
        """True if it was checked and is finished."""
        return self.looked and self.unfinished is None

    def stable_for(self, checkpoint: Checkpoint) -> float:
        """Return for how many seconds its files have not changed."""
        return max(time.monotonic() - self.since, youngest_age(checkpoint) or 0.0)

    def retry_later(self, settings: Settings) -> float:
        """Count a failure to read. Returns the seconds until the next attempt, which grow each time."""
        self.failures += 1
        pause = min(settings.scan_interval * 2.0 ** min(self.failures, 12), _LONGEST_PAUSE)
        self.retry_at = time.monotonic() + pause
        return pause


class NotYet(msgspec.Struct, frozen=True, kw_only=True):
    """Why a checkpoint cannot be verified yet, and after how many seconds that may change (None: unknown).

    `unfinished`: a part of it is missing.
    """

    why: str
    seconds: float | None
    unfinished: bool = False


def sample_of(samples: dict[str, CheckpointSample], checkpoint: Checkpoint) -> CheckpointSample:
    """Return what is remembered of a checkpoint, as its files are now: if they changed, nothing yet."""
    sample = samples.get(checkpoint.path)
    if sample is None or sample.signature != checkpoint.signature:
        goes = sample is not None and set(checkpoint.signature) < set(sample.signature)
        judged = sample is not None and goes and (sample.done or sample.judged)
        sample = CheckpointSample(signature=checkpoint.signature, since=time.monotonic(), judged=judged)
        samples[checkpoint.path] = sample
    return sample


def not_yet(
    view: RunView,
    checkpoint: Checkpoint,
    sample: CheckpointSample,
    work: Work,
    *,
    assume_quiet: bool,
    hurry: bool = False,
    may_skip_look: bool = False,
) -> NotYet | None:
    """Return why a checkpoint cannot be verified yet, or None if it can. Raises CouldNotTellError.

    `hurry`: what its layout proves to be whole is verified at once. `may_skip_look`: an old save is verified as it is,
    so a backlog costs no look at each file before its first verdict.
    """
    now = time.monotonic()
    if sample.retry_at > now:
        return NotYet(why="it could not be read; trying again", seconds=sample.retry_at - now)
    stable, sealed = sample.stable_for(checkpoint), view.current(checkpoint)
    given_up_at = max(view.settings.unfinished_limit, view.settings.settle)
    sample.old = may_skip_look and stable >= given_up_at and wait_for_writers(view, checkpoint, sample) <= 0
    if sample.old:
        return None
    if not sample.looked:
        sample.unfinished, sample.whole = completeness(view.run.storage, checkpoint, scanner=work.scanner)
        sample.looked = True
    by_writer = LAYOUTS[checkpoint.layout].sealed_by_writer
    why = sample.unfinished or sample.resaving
    if why is None and sealed is None and by_writer:
        why = "its writer has not sealed it"
        sample.looked = False  # the seal changes no file
    if why is not None:
        left = wait_for_writers(view, checkpoint, sample)
        return NotYet(why=why, seconds=left, unfinished=True) if left > 0 else None
    quiet = assume_quiet or (hurry and sample.whole) or (by_writer and sealed is not None)
    if stable < view.settings.settle and not quiet:
        return NotYet(why="it was written just now", seconds=view.settings.settle - stable)
    return None


def wait_for_writers(view: RunView, checkpoint: Checkpoint, sample: CheckpointSample) -> float:
    """Return after how many seconds to look again whether an unfinished save is given up; 0 or less: it is."""
    stable, settings = sample.stable_for(checkpoint), view.settings
    left = settings.unfinished_limit - stable
    if left <= 0:  # by times that a copy may have brought along (rsync -a): none of its files came just now
        return pause_between_files(checkpoint, settings.settle) - _here_for(checkpoint)
    if settings.settle <= 0 or not writers_are_seen(view.run, checkpoint):
        return left
    quiet = max(pause_between_files(checkpoint, settings.settle), _usual_pause(view, checkpoint))
    if stable < quiet:
        return min(left, quiet - stable)
    return 0.0 if writer_of(view.run, checkpoint, quiet) is None else min(left, settings.settle)


def _here_for(checkpoint: Checkpoint) -> float:
    """Return for how many seconds no file of it came, was renamed or written, whatever its time says, where the file
    system knows, by a clock that was not put back."""
    newest = max((entry.ctime_ns or 0 for entry in checkpoint.entries), default=0)
    age = time.time() - newest / 1e9
    return age if newest and age >= 0 else math.inf


def _usual_pause(view: RunView, checkpoint: Checkpoint) -> float:
    """Return how long the writer of a save may pause between two files, by the other saves of its series."""
    own = view.listing.series.get(checkpoint.series)
    others = [c for c in own.checkpoints if c.path != checkpoint.path] if own is not None else []
    newest = sorted(others, key=lambda c: c.written_at)[-_COMPARED:]
    return usual_pause([e.mtime_ns / 1e9 for e in c.entries if e.mtime_ns is not None] for c in newest)


def is_followed(checkpoint: Checkpoint, others: Iterable[Checkpoint]) -> bool:
    """True if the next save of its series began after all of its files were written: its writer has gone on."""
    step, series, written = numbers_of(checkpoint.step), checkpoint.series, checkpoint.written_at
    later = (other for other in others if other.series == series and numbers_of(other.step) > step)
    began = (min((entry.mtime_ns or 0 for entry in other.entries), default=0) for other in later)
    return written > 0 and any(time > written for time in began)
