"""Replicate: have a run's good checkpoints also lie elsewhere, each of them verified there."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ckptguard.errors import (
    CkptguardError,
    CouldNotTellError,
    ObjectMissingError,
    RecordsError,
    SettingsError,
    StoppedError,
)
from ckptguard.records.kept import read_kept
from ckptguard.records.pins import InUse
from ckptguard.records.run import Run, open_run, read_record
from ckptguard.records.trash import trash_folder
from ckptguard.replicas.mirror_records import (
    clear_broken_beginning,
    join,
    mirror_beside,
    mirror_decisions,
    mirror_verdicts,
    records_beside,
)
from ckptguard.replicas.send_checkpoint import Delivery, has_arrived, send_checkpoint
from ckptguard.replicas.send_files import pace_of
from ckptguard.runs.find_known_good import Candidate, candidate_of, ranked_candidates
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work
from ckptguard.storage import normalise_url
from ckptguard.storage.failures import translated
from ckptguard.storage.retries import Retries
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome


class Replicated(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint and one replica. `done`: "there", "sent", "would send", "raced" (another process sealed it there
    first), "gone" (from the run, meanwhile), "damaged" (in the run: it was not sent), or "failed". `verified` says how
    its bytes were found to be right there, where that was done now; `sent` are bytes that went over."""

    path: str
    id: CheckpointId
    bytes: int
    done: str
    sent: int = 0
    verified: str | None = None
    message: str | None = None


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica holds now. `behind`: how many of the checkpoints that it should hold are not good there;
    `last_good` is the newest that is. `trouble` says what ended the work early."""

    url: str
    behind: int | None
    last_good: CheckpointId | None
    checkpoints: tuple[Replicated, ...] = ()
    trouble: str | None = None


class ToSend(msgspec.Struct, frozen=True, kw_only=True):
    """The known-good checkpoints of a run, newest first. `unreadable`: those that cannot be read, and why."""

    candidates: Sequence[Candidate]
    unreadable: Mapping[CheckpointId, CouldNotTellError]


def replicate(
    view: RunView,
    url: str,
    *,
    dry_run: bool = False,
    work: Work = PLAIN,
    hold: Callable[[], None] | None = None,
    arrived: set[CheckpointId] | None = None,
) -> Replica:
    """Send the good checkpoints of a run to one replica, the newest first, and read each back from there.

    Trouble with the replica is told in the answer; what arrived stays, and the next call goes on from there. `hold`
    waits while something more urgent goes on; `arrived` remembers between calls what is there for good. SettingsError
    for a place that cannot be a replica of this run.
    """
    run, arrived = view.run, set() if arrived is None else arrived
    to_send = wanted_in_replica(view)
    wanted = list(to_send.candidates)
    done: list[Replicated] = []
    trouble: str | None = None
    target: RunView | None = None
    try:
        target = open_replica(view, url, make=not dry_run, retries=Retries(stop=work.stop))
        if not dry_run:
            join(run, target)
            mirror_decisions(run, target.run)
            mirror_verdicts(view, target)
        pace, beside = pace_of(work, view.settings, hold), records_beside(run)
        with InUse(run, "replication") as in_use:
            for candidate in to_send.candidates:
                try:
                    if _is_there(target, candidate, arrived):
                        done.append(_replicated(candidate, "there"))
                    elif dry_run:
                        done.append(_replicated(candidate, "would send"))
                    else:
                        in_use.pin(candidate.id)
                        mirror_beside(run, target.run, candidate.manifest, beside)
                        delivery = send_checkpoint(view, target, candidate, work=work, pace=pace)
                        done.append(_delivered(candidate, delivery))
                except StoppedError:
                    raise
                except CkptguardError as error:
                    done.append(_replicated(candidate, "failed", message=error.message))
                if done[-1].done in ("failed", "damaged") and _is_gone(view, candidate):
                    done[-1] = _replicated(candidate, "gone", message="it was removed from the run meanwhile")
                    wanted = [other for other in wanted if other is not candidate]
            done += [_not_read(view, id, error) for id, error in to_send.unreadable.items()]
    except CouldNotTellError as error:
        trouble = error.message
    behind, last = None, None
    with contextlib.suppress(CouldNotTellError):
        if target is not None:
            target.refresh()  # others may have sent some, too
            behind, last = standing(target, wanted)
    return Replica(
        url=target.run.url if target is not None else normalise_url(url),
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


def open_replica(view: RunView, url: str, *, make: bool = False, retries: Retries | None = None) -> RunView:
    """A replica of a run as a run of its own. SettingsError if it lies in the run, or the run in it."""
    place, settings = normalise_url(url), view.settings.of_replica()
    refuse_nested(view.run.url, place, f"{place} cannot be a replica of {view.run.url}")
    if make and "://" not in place:
        with translated("", place):
            os.makedirs(place, exist_ok=True)
    opening = functools.partial(open_run, place, settings, must_exist=False, retries=retries)
    try:
        run = opening()
    except RecordsError:
        if not make:
            raise
        clear_broken_beginning(place, settings.storage)
        run = opening()
    return RunView(run, settings)


def refuse_nested(one: str, other: str, sentence: str) -> None:
    """SettingsError if one place lies in the other, or is the same."""
    first, second = (_real(url).rstrip("/") + "/" for url in (one, other))
    if first.startswith(second) or second.startswith(first):
        raise SettingsError(f"{sentence}: one lies in the other", hint="name another place")


def wanted_in_replica(view: RunView) -> ToSend:
    """What a replica should hold: every known-good checkpoint. How long they stay there, its own settings say."""
    candidates: list[Candidate] = []
    unreadable: dict[CheckpointId, CouldNotTellError] = {}
    for id in ranked_candidates(view.history):
        try:
            candidate = candidate_of(view.history, id)
        except CouldNotTellError as error:
            unreadable[id] = error
            continue
        if candidate is not None:
            candidates.append(candidate)
    return ToSend(candidates=candidates, unreadable=unreadable)


def standing(target: RunView, wanted: Sequence[Candidate]) -> tuple[int, CheckpointId | None]:
    """How many of the wanted are not good in a replica, by its ledger, and the newest that is. CouldNotTellError."""
    good = [candidate.id for candidate in wanted if target.is_good(candidate.id)]
    return len(wanted) - len(good), good[0] if good else None


def _is_there(target: RunView, candidate: Candidate, arrived: set[CheckpointId]) -> bool:
    """Whether nothing is to be sent; what is there for good is noted in `arrived`."""
    if candidate.id not in arrived and has_arrived(target, candidate) and not _is_lost(target, candidate):
        arrived.add(candidate.id)
    return candidate.id in arrived


def _is_lost(target: RunView, candidate: Candidate) -> bool:
    """Whether a replica holds a checkpoint by its records only: its files are damaged or gone, and nobody pruned it."""
    run, verdict = target.run, target.history.verdict(candidate.id)
    if verdict is None or verdict.outcome is not Outcome.GOOD:
        return verdict is not None and verdict.place_damaged and verdict.content is Outcome.GOOD
    with contextlib.suppress(ObjectMissingError):
        if all(run.storage.stat(f.path).size == f.size for f in candidate.manifest.files):
            return False
    return read_kept(run, candidate.id) is None and not _is_trashed(run, candidate.id)


def _is_gone(view: RunView, candidate: Candidate) -> bool:
    """Whether retention, or the trainer, has removed the whole of a checkpoint since it was looked for."""
    id = candidate.id
    try:
        view.refresh(id.series)
        found = view.history.standings(id.series).get(id)
        if found is None or found.outcome is not Outcome.GOOD:
            return False
        if _is_trashed(view.run, id):
            return True
        return read_kept(view.run, id) is None and not any(
            _is_present(view.run, f.path) for f in candidate.manifest.files
        )
    except CouldNotTellError:
        return False


def _is_trashed(run: Run, id: CheckpointId) -> bool:
    return read_record(run, trash_folder(id) + ".json") is not None


def _is_present(run: Run, path: str) -> bool:
    try:
        run.storage.stat(path)
    except ObjectMissingError:
        return False
    return True


def _not_read(view: RunView, id: CheckpointId, error: CouldNotTellError) -> Replicated:
    path, size = id.series, 0
    with contextlib.suppress(CouldNotTellError):
        manifest = view.history.manifest(id)
        path, size = (manifest.path, manifest.bytes) if manifest is not None else (path, size)
    return Replicated(path=path, id=id, bytes=size, done="failed", message=error.message)


def _delivered(candidate: Candidate, delivery: Delivery) -> Replicated:
    done = _replicated(candidate, delivery.done, message=delivery.message)
    return msgspec.structs.replace(done, sent=delivery.sent, verified=delivery.verified)


def _replicated(candidate: Candidate, done: str, *, message: str | None = None) -> Replicated:
    manifest = candidate.manifest
    return Replicated(path=manifest.path, id=candidate.id, bytes=manifest.bytes, done=done, message=message)


def _real(url: str) -> str:
    return url if "://" in url else os.path.realpath(url)
