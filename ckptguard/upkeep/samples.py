"""What a pass starts from, and what is remembered of a checkpoint until it has its verdict."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from ckptguard.layouts import Checkpoint
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.trash import FOLDER as TRASH
from ckptguard.runs.run_view import Listing
from ckptguard.runs.settling import youngest_age
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings

_LONGEST_PAUSE = 3600.0  # seconds between two attempts to read an unreadable checkpoint


@dataclass(frozen=True)
class PassStart:
    """What a pass starts from. If two are equal, nothing that a pass depends on has changed."""

    listing: Listing  # the same object while no entry differs
    names: frozenset[str]
    settings: Settings
    beside: frozenset[str] = field(default=frozenset(), compare=False)  # other records, on which no pass depends
    listed: Sequence[str] = field(default=(), compare=False)  # the names of all records, as they were listed

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
    done: bool = False  # there is a verdict for this signature
    id: CheckpointId | None = None  # the generation that this verdict is about
    retry_at: float = 0.0
    failures: int = 0
    judged: bool = False  # it had its verdict, and since then only lost files

    def was_saved_over(self, signature: tuple[tuple[object, ...], ...]) -> bool:
        """True if another save took its place before its verdict, and it does not just go on: it was provably whole, or
        its only file was replaced by another one."""
        now = {key: rest for key, *rest in signature}
        over = [(rest, now[key]) for key, *rest in self.signature if now.get(key, rest) != rest]
        if not over or not self.looked or self.done or self.judged:
            return False
        inodes = {one[2] for one in over[0]}
        return self.whole or (len(self.signature) == len(now) == 1 and len(inodes) == 2 and None not in inodes)

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
