"""Samples: what passes over a run have noticed of one checkpoint, and whether it can be verified by now."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.runs.file_signatures import looks_unchanged
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import youngest_age
from ckptguard.runs.work import Work
from ckptguard.values.settings import Settings
from ckptguard.verify.collect_evidence import unfinished_because

Signature = tuple[tuple[object, ...], ...]
_LONGEST_PAUSE = 3600.0  # seconds between two tries to read what cannot be read


@dataclass
class CheckpointSample:
    """A checkpoint as storage showed it, since when, and what was found out about it since."""

    signature: Signature
    since: float  # monotonic: when this signature was first seen
    unfinished: str | None = None  # why, as of this signature
    looked: bool = False  # `unfinished` was computed
    done: bool = False  # a verdict stands for this signature
    retry_at: float = 0.0
    failures: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether it was looked at and found to be finished."""
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


def stands(view: RunView, checkpoint: Checkpoint) -> bool:
    """Whether a verdict stands for exactly these files, as far as storage reports: sizes, times and inodes are
    those of the manifest. (Bytes that rot under equal times are found by verifying, not by watching.)"""
    id = view.current(checkpoint)
    if id is None or not view.history.has_verdict(id):
        return False
    manifest = view.history.manifest(id)
    if manifest is None or set(checkpoint.files) != {f.path for f in manifest.files}:
        return False
    verdict = view.history.verdict(id)
    return verdict is not None and looks_unchanged(checkpoint, manifest, verdict)


def not_yet(
    view: RunView, checkpoint: Checkpoint, sample: CheckpointSample, work: Work, *, assume_quiet: bool
) -> NotYet | None:
    """Why a checkpoint cannot be verified yet; None when it can. CouldNotTellError if that cannot be told."""
    now = time.monotonic()
    if sample.retry_at > now:
        return NotYet(why="it could not be read; trying again", seconds=sample.retry_at - now)
    stable = sample.stable_for(checkpoint)
    if not sample.looked:
        sample.unfinished = unfinished_because(view.run.storage, checkpoint, scanner=work.scanner)
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
