"""Replicate: have a run's good checkpoints also lie elsewhere, each of them verified there."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence

import msgspec

from ckptguard.decisions.retention import Present, decide
from ckptguard.errors import (
    CkptguardError,
    CouldNotTellError,
    ObjectMissingError,
    RecordsError,
    SettingsError,
    StoppedError,
)
from ckptguard.records.elapsed import seconds_of, this_moment
from ckptguard.records.kept import read_kept
from ckptguard.records.pins import InUse
from ckptguard.records.run import Run
from ckptguard.records.trash import list_trashed
from ckptguard.replicas.mirror_records import (
    clear_broken_beginning,
    join,
    mirror_beside,
    mirror_decisions,
    mirror_verdicts,
)
from ckptguard.replicas.send_checkpoint import has_arrived, send_checkpoint
from ckptguard.replicas.send_file import pace_of
from ckptguard.runs.find_known_good import Candidate, known_good_candidates
from ckptguard.runs.history import History, Key, load_history
from ckptguard.runs.removal_holds import pins_of
from ckptguard.runs.sealed_content import is_good
from ckptguard.scan import Progress, Scanner, scan_files
from ckptguard.scan.paced_reader import Pace
from ckptguard.storage import normalise_url
from ckptguard.storage.failures import translated
from ckptguard.storage.retries import Retries
from ckptguard.values.ids import checkpoint_id
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome


class Replicated(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint and one replica. `done`: "there", "sent", "would send", "raced" (another process sealed it there
    first), "gone" (from the run, meanwhile), "damaged" (in the run: it was not sent), or "failed". `verified` says how
    its bytes were found to be right there, where that was done now; `sent` are bytes that went over."""

    path: str
    series: str
    step: int | None
    id: str
    bytes: int
    done: str
    sent: int = 0
    verified: str | None = None
    message: str | None = None


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica holds now. `behind`: how many of the checkpoints that it should hold are not good there;
    `last_good` is the id of the newest that is. `trouble` says what ended the work early."""

    url: str
    behind: int | None
    last_good: str | None
    checkpoints: tuple[Replicated, ...] = ()
    trouble: str | None = None


def replicate(
    run: Run,
    settings: Settings,
    url: str,
    *,
    dry_run: bool = False,
    rate: float | None = None,
    scanner: Scanner = scan_files,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    hold: Callable[[], None] | None = None,
    arrived: set[tuple[str, Key]] | None = None,
) -> Replica:
    """Send the good checkpoints that the settings for replicas keep to one replica, the newest first.

    Trouble with the replica is told in the answer; what arrived stays, and the next call goes on from there. `hold`
    waits while something more urgent goes on; `arrived` remembers between calls what is there for good. SettingsError
    for a place that cannot be a replica of this run.
    """
    arrived = set() if arrived is None else arrived
    unreadable: dict[tuple[str, Key], CouldNotTellError] = {}
    wanted = wanted_in_replica(run, settings, unreadable)
    done: list[Replicated] = []
    trouble: str | None = None
    target: Run | None = None
    try:
        target = open_replica(run, url, make=not dry_run, retries=Retries(stop=stop))
        if not dry_run:
            join(run, target)
            mirror_decisions(run, target)
            mirror_verdicts(run, target)
        pace = pace_of(rate, stop, progress, hold)
        with InUse(run, "replication") as in_use:
            history = load_history(target)
            for candidate in wanted:
                place = (candidate.answer.series, candidate.key)
                try:
                    if place in arrived or (has_arrived(history, candidate) and not _is_lost(history, candidate)):
                        arrived.add(place)
                        done.append(_replicated(candidate, "there"))
                    elif dry_run:
                        done.append(_replicated(candidate, "would send"))
                    else:
                        in_use.pin(*place)
                        done.append(_send(run, target, candidate, settings, scanner, pace))
                except StoppedError:
                    raise
                except CkptguardError as error:
                    done.append(_replicated(candidate, "failed", message=error.message))
                if done[-1].done in ("failed", "damaged") and _is_gone(run, candidate):
                    done[-1] = _replicated(candidate, "gone", message="it was removed from the run meanwhile")
                    wanted = [other for other in wanted if other is not candidate]
            done += [_not_read(run, *place, error) for place, error in unreadable.items()]
    except CouldNotTellError as error:
        trouble = error.message
    behind, last = None, None
    with contextlib.suppress(CouldNotTellError):
        behind, last = standing(target, wanted) if target is not None else (None, None)
    return Replica(
        url=target.url if target is not None else normalise_url(url),
        behind=behind,
        last_good=last,
        checkpoints=tuple(done),
        trouble=trouble,
    )


def replica_urls(url: str, settings: Settings) -> tuple[str, ...]:
    """Where the settings want replicas of the run under `url`, local ones first; ``{run}`` stands for its own name."""
    name = url.rstrip("/").rpartition("/")[2]
    urls = [normalise_url(place.replace("{run}", name)) for place in settings.replicas]
    return tuple(sorted(dict.fromkeys(urls), key=lambda place: "://" in place))


def open_replica(run: Run, url: str, *, make: bool = False, retries: Retries | None = None) -> Run:
    """The replica as a run. SettingsError if it lies in the run, or the run in it."""
    place = normalise_url(url)
    refuse_nested(run.url, place, f"{place} cannot be a replica of {run.url}")
    if make and "://" not in place:
        with translated("", place):
            os.makedirs(place, exist_ok=True)
    opening = functools.partial(run.sibling, place, retries=retries)
    try:
        return opening()
    except RecordsError:
        if not make:
            raise
        clear_broken_beginning(place, run.options)
        return opening()


def refuse_nested(one: str, other: str, sentence: str) -> None:
    """SettingsError if one place lies in the other, or is the same."""
    first, second = (_real(url).rstrip("/") + "/" for url in (one, other))
    if first.startswith(second) or second.startswith(first):
        raise SettingsError(f"{sentence}: one lies in the other", hint="name another place")


def wanted_in_replica(
    run: Run, settings: Settings, unreadable: dict[tuple[str, Key], CouldNotTellError] | None = None
) -> list[Candidate]:
    """The known-good checkpoints that a replica should hold, newest first: all, or those that its rules keep. Those of
    which it cannot be told whether they are there are noted in `unreadable`."""
    history = load_history(run)
    candidates = known_good_candidates(run, history, unreadable={} if unreadable is None else unreadable)
    policy, pins = settings.retention(replica=True), pins_of(run)
    present = [
        Present(
            path=c.answer.path,
            series=c.answer.series,
            step=c.key[0],
            generation=c.key[1],
            outcome=Outcome.GOOD,
            saved=seconds_of(c.manifest.sealed_at),
            metrics=c.manifest.metrics,
            bytes=c.manifest.bytes,
            holds=tuple(pins.get((c.answer.series, c.key), ())),
        )
        for c in candidates
    ]
    kept = {d.checkpoint.path for d in decide(present, policy, now=this_moment().wall) if d.keep}
    return [c for c in candidates if c.answer.path in kept]


def _is_lost(target: History, candidate: Candidate) -> bool:
    """Whether a replica holds a checkpoint by its records only: its files are damaged or gone, and nobody pruned it."""
    series, key = candidate.answer.series, candidate.key
    verdict = target.verdict(series, key)
    if verdict is None or verdict.outcome is not Outcome.GOOD:
        return verdict is not None and verdict.place_damaged and verdict.content is Outcome.GOOD
    if read_kept(target.run, series, *key) is not None or (series, *key) in list_trashed(target.run):
        return False
    try:
        return any(target.run.storage.stat(f.path).size != f.size for f in candidate.manifest.files)
    except ObjectMissingError:
        return True


def _is_gone(run: Run, candidate: Candidate) -> bool:
    """Whether retention, or the trainer, has removed the whole of a checkpoint since it was looked for."""
    series, key = candidate.answer.series, candidate.key
    try:
        standing = load_history(run).standings(series).get(key)
        if standing is None or standing.outcome is not Outcome.GOOD:
            return False
        if (series, *key) in list_trashed(run):
            return True
        return read_kept(run, series, *key) is None and not any(
            _is_there(run, f.path) for f in candidate.manifest.files
        )
    except CouldNotTellError:
        return False


def _is_there(run: Run, path: str) -> bool:
    try:
        run.storage.stat(path)
    except ObjectMissingError:
        return False
    return True


def _not_read(run: Run, series: str, key: Key, error: CouldNotTellError) -> Replicated:
    path, size = series, 0
    with contextlib.suppress(CouldNotTellError):
        manifest = load_history(run).manifest(series, key)
        path, size = (manifest.path, manifest.bytes) if manifest is not None else (path, size)
    return Replicated(
        path=path, series=series, step=key[0], id=checkpoint_id(*key), bytes=size, done="failed", message=error.message
    )


def _send(run: Run, target: Run, candidate: Candidate, settings: Settings, scanner: Scanner, pace: Pace) -> Replicated:
    mirror_beside(run, target, candidate.manifest)
    delivery = send_checkpoint(run, target, candidate, settings, scanner=scanner, pace=pace, heal=True)
    return _replicated(
        candidate, delivery.done, sent=delivery.sent, verified=delivery.verified, message=delivery.message
    )


def _replicated(
    candidate: Candidate, done: str, *, sent: int = 0, verified: str | None = None, message: str | None = None
) -> Replicated:
    answer, manifest = candidate.answer, candidate.manifest
    return Replicated(
        path=manifest.path,
        series=answer.series,
        step=answer.step,
        id=answer.id,
        bytes=manifest.bytes,
        done=done,
        sent=sent,
        verified=verified,
        message=message,
    )


def standing(target: Run, wanted: Sequence[Candidate]) -> tuple[int, str | None]:
    """How many of the wanted are not good in a replica, by its ledger, and the newest that is. CouldNotTellError."""
    history = load_history(target)
    good = [c for c in wanted if is_good(history, c.answer.series, c.key)]
    return len(wanted) - len(good), checkpoint_id(*good[0].key) if good else None


def _real(url: str) -> str:
    return url if "://" in url else os.path.realpath(url)
