"""Reconcile: one pass over a run. Find finished saves, protect them, verify them, promote or release their copies.

The daemon, ``--once`` and the guard only loop over this. Storage is the truth: nothing here relies on having seen an
event, and a pass that is killed at any point is simply made again.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import msgspec

from ckptguard.errors import (
    BusyError,
    ChangedWhileReadError,
    CouldNotTellError,
    ObjectMissingError,
    ResavingError,
)
from ckptguard.keep.copies import keep_checkpoint, release, release_unpinned, trim_kept
from ckptguard.keep.quarantine import finish_quarantines
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.kept import list_kept, read_kept
from ckptguard.records.run import Run
from ckptguard.records.scrubs import Where
from ckptguard.repair.repair import mend
from ckptguard.retention.prune import prune_by_settings
from ckptguard.retention.trash import settle_trash
from ckptguard.runs.file_signatures import looks_unchanged
from ckptguard.runs.history import History, Key, load_history
from ckptguard.runs.listing import list_checkpoints
from ckptguard.runs.lock import run_lock
from ckptguard.runs.results import Checked
from ckptguard.runs.sealed_content import is_good, kept_matches, made_of_sealed
from ckptguard.runs.settling import youngest_age
from ckptguard.scan import Scanner, scan_files
from ckptguard.upkeep.leftovers import collect_leftovers
from ckptguard.upkeep.protect import protect
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verify.checkpoint import Resave, verify_checkpoint
from ckptguard.verify.collect_evidence import unfinished_because

_COLLECT_INTERVAL = 3600.0  # seconds; what is not old yet is at the next look
_PRUNE_INTERVAL = 600.0  # seconds; the trash is emptied, and pins are lifted, without anything being saved
Signature = tuple[tuple[object, ...], ...]


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint without a verdict, and why."""

    path: str
    series: str
    step: int | None
    reason: str


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass did. `next_in`: seconds after which a pending checkpoint may be ready. `could_not_tell` are
    sentences about what could not be read or written; everything concerned stays pending."""

    checked: tuple[Checked, ...] = ()
    pending: tuple[Waiting, ...] = ()
    gone: tuple[str, ...] = ()
    pruned: tuple[str, ...] = ()  # paths that the settings' policy did not keep
    could_not_tell: tuple[str, ...] = ()
    next_in: float | None = None


@dataclass
class _Sample:
    signature: Signature
    since: float  # monotonic: when this signature was first seen
    unfinished: str | None = None  # why, as of this signature
    looked: bool = False  # `unfinished` was computed
    done: bool = False  # a verdict stands for this signature
    retry_at: float = 0.0
    failures: int = 0


@dataclass
class Watch:
    """Notes about one run between passes. They only save work: losing them loses nothing."""

    samples: dict[str, _Sample] = field(default_factory=dict)
    collect_at: float = 0.0  # monotonic: when leftovers of killed processes are looked for
    hopeless: dict[Where, float] = field(default_factory=dict)  # what could not be repaired, and until when to wait
    prune_at: float = 0.0  # monotonic: when pruning is due although nothing new was verified

    def prune_is_due(self) -> bool:
        """Whether it is; the next time is some minutes away."""
        now = time.monotonic()
        due = now >= self.prune_at
        self.prune_at = now + _PRUNE_INTERVAL if due else self.prune_at
        return due

    def forget(self, path: str) -> None:
        """Have a checkpoint read again in the next pass."""
        self.samples.pop(path, None)


def reconcile(
    run: Run,
    settings: Settings,
    watch: Watch,
    *,
    scanner: Scanner = scan_files,
    stop: threading.Event | None = None,
    assume_quiet: bool = False,
) -> Pass:
    """Make one pass. `assume_quiet` is for a trainer that knows its saves are finished.

    StorageError if the run cannot be listed; trouble with one checkpoint is told in the answer.
    """
    history = load_history(run)
    troubles: list[str] = []
    with run_lock(run):
        finish_quarantines(run, history)
        try:
            settle_trash(run)
        except CouldNotTellError as error:
            troubles.append(f"the trash could not be looked after: {error.message}")
        if time.monotonic() >= watch.collect_at:
            watch.collect_at = time.monotonic() + _COLLECT_INTERVAL
            try:
                collect_leftovers(run)
            except CouldNotTellError as error:
                troubles.append(f"what killed processes left could not be collected: {error.message}")
    checkpoints = list_checkpoints(run)
    gone = _forget_gone(watch, checkpoints)
    ready: list[tuple[Checkpoint, _Sample]] = []
    pending: list[Waiting] = []
    delays: list[float] = []
    for checkpoint in sorted(checkpoints, key=lambda c: (c.step is None, c.step or 0, c.path)):
        sample = _sample(watch, checkpoint)
        try:
            if sample.done or _stands(history, checkpoint, sample):
                continue
            why, delay = _not_ready(
                run, history, checkpoint, sample, settings, scanner=scanner, assume_quiet=assume_quiet
            )
        except CouldNotTellError as error:
            why, delay = error.message, _retry_later(sample, settings)
            troubles.append(f"{checkpoint.path}: {why}")
        if sample.looked and sample.unfinished is None:
            troubles += protect(run, history, checkpoint, settings)
        if why is None:
            ready.append((checkpoint, sample))
        else:
            pending.append(_waiting(checkpoint, why))
            delays += [] if delay is None else [delay]
    checked: list[Checked] = []
    for checkpoint, sample in ready:
        if stop is not None and stop.is_set():
            pending.append(_waiting(checkpoint, "the daemon is stopping"))
            continue
        result, why = _verify(run, checkpoint, sample, settings, scanner)
        if result is not None:
            checked.append(result)
        else:
            pending.append(_waiting(checkpoint, why))
            delays.append(max(0.0, sample.retry_at - time.monotonic()))
            if sample.failures:
                troubles.append(f"{checkpoint.path}: {why}")
    troubles += _settle_kept(run, checkpoints, settings)
    pruned: tuple[str, ...] = ()
    if checked or watch.prune_is_due():
        mended = mend(run, settings, watch.hopeless, scanner=scanner)
        checked += mended.checked
        pruned, why_not = prune_by_settings(run, settings)
        troubles += [*mended.could_not_tell, *why_not]
    return Pass(
        checked=tuple(checked),
        pruned=pruned,
        pending=tuple(pending),
        gone=gone,
        could_not_tell=tuple(troubles),
        next_in=min(delays, default=None),
    )


def _sample(watch: Watch, checkpoint: Checkpoint) -> _Sample:
    sample = watch.samples.get(checkpoint.path)
    if sample is None or sample.signature != checkpoint.signature:
        sample = _Sample(signature=checkpoint.signature, since=time.monotonic())
        watch.samples[checkpoint.path] = sample
    return sample


def _forget_gone(watch: Watch, checkpoints: list[Checkpoint]) -> tuple[str, ...]:
    gone = sorted(set(watch.samples) - {c.path for c in checkpoints})
    for path in gone:
        del watch.samples[path]
    return tuple(gone)


def _stands(history: History, checkpoint: Checkpoint, sample: _Sample) -> bool:
    """Whether a verdict stands for exactly these files, as far as storage reports: sizes, times and inodes are
    those of the manifest. (Bytes that rot under equal times are found by verifying, not by watching.)"""
    key = history.current(checkpoint.series, checkpoint.step, checkpoint.path)
    if key is None or key not in history.standings(checkpoint.series):
        return False
    manifest = history.manifest(checkpoint.series, key)
    if manifest is None or set(checkpoint.files) != {f.path for f in manifest.files}:
        return False
    verdict = history.verdict(checkpoint.series, key)
    if verdict is None or not looks_unchanged(checkpoint, manifest, verdict):
        return False
    sample.done = True
    return True


def _not_ready(
    run: Run,
    history: History,
    checkpoint: Checkpoint,
    sample: _Sample,
    settings: Settings,
    *,
    scanner: Scanner,
    assume_quiet: bool,
) -> tuple[str | None, float | None]:
    """(why a checkpoint cannot be verified yet, seconds until that may change); (None, None) when it can."""
    now = time.monotonic()
    if sample.retry_at > now:
        return "it could not be read; trying again", sample.retry_at - now
    stable = max(now - sample.since, youngest_age(checkpoint) or 0.0)
    if not sample.looked:
        sample.unfinished = unfinished_because(run.storage, checkpoint, scanner=scanner)
        sample.looked = True
    sealed = history.current(checkpoint.series, checkpoint.step, checkpoint.path)
    why = sample.unfinished
    if why is None and sealed is None and LAYOUTS[checkpoint.layout].sealed_by_writer:
        why = "its writer has not sealed it"
        sample.looked = False  # the seal changes no file
    if why is not None:
        left = settings.unfinished_limit - stable
        return (why, left) if left > 0 else (None, None)
    by_writer = sealed is not None and LAYOUTS[checkpoint.layout].sealed_by_writer
    if stable < settings.settle and not assume_quiet and not by_writer:
        return "it was written just now", settings.settle - stable
    return None, None


def _retry_later(sample: _Sample, settings: Settings) -> float:
    """Note a failure to read; returns the seconds until the next try, which grow."""
    sample.failures += 1
    pause = min(settings.scan_interval * 2.0 ** min(sample.failures, 12), 3600.0)
    sample.retry_at = time.monotonic() + pause
    return pause


def _verify(
    run: Run, checkpoint: Checkpoint, sample: _Sample, settings: Settings, scanner: Scanner
) -> tuple[Checked | None, str]:
    stable = max(time.monotonic() - sample.since, youngest_age(checkpoint) or 0.0)
    left = settings.unfinished_limit - stable
    try:
        result = verify_checkpoint(
            run, checkpoint, settings, scanner=scanner, resave=Resave.WAIT if left > 0 else Resave.GIVE_UP
        )
    except ResavingError as error:
        # A new look is due when a file changes (then there is a new sample), or when patience ends.
        sample.retry_at = time.monotonic() + left
        return None, error.message
    except (ChangedWhileReadError, ObjectMissingError) as error:
        sample.retry_at = time.monotonic() + settings.settle
        return None, error.message
    except CouldNotTellError as error:
        _retry_later(sample, settings)
        return None, error.message
    sample.done = True
    return result, ""


def _settle_kept(run: Run, checkpoints: list[Checkpoint], settings: Settings) -> list[str]:
    """Promote and release copies by the verdicts there are now, and keep good checkpoints that have no copy yet."""
    history = load_history(run)
    troubles = []
    try:
        with run_lock(run):
            unwanted = []
            for series, step, generation in list_kept(run):
                key = (step, generation)
                copy = read_kept(run, series, *key)
                if copy is None or key not in history.standings(series):
                    continue
                manifest = history.manifest(series, key)
                if manifest is not None and not made_of_sealed(copy, manifest):
                    release(run, series, key)  # pinned or not: what is pinned is the content that was sealed
                elif manifest is None or not kept_matches(run, copy, manifest) or not is_good(history, series, key):
                    unwanted.append((series, key))
            release_unpinned(run, unwanted)
            for checkpoint, key in _good_without_copy(run, history, checkpoints, settings):
                keep_checkpoint(run, checkpoint, key[1], settings)
            trim_kept(run, history, settings)
    except (BusyError, CouldNotTellError) as error:
        troubles.append(f"kept copies could not be looked after: {error.message}")
    return troubles


def _good_without_copy(
    run: Run, history: History, checkpoints: list[Checkpoint], settings: Settings
) -> list[tuple[Checkpoint, Key]]:
    wanted = []
    listed = set(list_kept(run))
    for series in {c.series for c in checkpoints}:
        in_place: dict[int | None, list[Checkpoint]] = {}
        for checkpoint in checkpoints:
            if checkpoint.series == series:
                in_place.setdefault(checkpoint.step, []).append(checkpoint)
        good = sorted(
            (k for k, s in history.standings(series).items() if s.outcome is Outcome.GOOD and k[0] is not None),
            reverse=True,
        )
        left = settings.keep_good
        for key in good:  # of which many may be gone: only those that are somewhere count
            if left <= 0:
                break
            if (series, *key) in listed and read_kept(run, series, *key) is not None:
                left -= 1
                continue
            for checkpoint in in_place.get(key[0], ()):
                if history.current_if_readable(series, key[0], checkpoint.path) == key and _is_as_sealed(
                    history, checkpoint, key
                ):
                    wanted.append((checkpoint, key))
                    left -= 1
                    break
    return wanted


def _is_as_sealed(history: History, checkpoint: Checkpoint, key: Key) -> bool:
    """Whether its files look as they did when they were judged: another content would be no copy of it."""
    manifest = history.manifest(checkpoint.series, key)
    verdict = history.verdict(checkpoint.series, key)
    return manifest is not None and verdict is not None and looks_unchanged(checkpoint, manifest, verdict)


def _waiting(checkpoint: Checkpoint, why: str) -> Waiting:
    return Waiting(path=checkpoint.path, series=checkpoint.series, step=checkpoint.step, reason=why)
