"""Start from a replica: give a run whose files are lost, or a new one, the replica's known-good checkpoint and all that
is on record about the training, so that it goes on from there."""

from __future__ import annotations

import logging
import os
import threading

import msgspec

from ckptguard.errors import (
    CkptguardError,
    CouldNotTellError,
    NoKnownGoodError,
    ObjectMissingError,
    SettingsError,
    StoppedError,
)
from ckptguard.records.lineage import read_lineage
from ckptguard.records.pins import InUse
from ckptguard.records.run import Run, open_run
from ckptguard.replicas.find_replicas import has_newest, open_replicas, order_of, replica_candidates
from ckptguard.replicas.mark_later_generations import leave_behind
from ckptguard.replicas.mirror_records import join, mirror_beside, mirror_decisions, mirror_history
from ckptguard.replicas.replicate import refuse_nested
from ckptguard.replicas.send_checkpoint import send_checkpoint
from ckptguard.replicas.send_file import pace_of
from ckptguard.runs.find_known_good import Candidate, known_good_candidates
from ckptguard.runs.history import load_history
from ckptguard.scan import Progress, Scanner, scan_files
from ckptguard.storage import normalise_url
from ckptguard.storage.failures import translated
from ckptguard.values.ids import RECORDS_FOLDER
from ckptguard.values.settings import Settings

_log = logging.getLogger("ckptguard")


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A run that can go on: `path` is its known-good checkpoint, usable as it is; `source` where it came from; `sent`
    the bytes that came over."""

    run: str
    source: str
    path: str
    series: str
    step: int | None
    id: str
    bytes: int
    sent: int


def start_from_replica(
    replica: Run,
    url: str,
    settings: Settings,
    *,
    step: int | None = None,
    scanner: Scanner = scan_files,
    progress: Progress | None = None,
) -> Started:
    """Have the run under `url` hold the replica's known-good checkpoint (or that of `step`), in place and verified.

    With `step` the training goes on from there: what the replica has of later steps is left behind, as by a rollback.
    Without it an older one stands in for what is found damaged, and a warning says so. What was begun and cut short
    goes on. SettingsError if something lies there, or one place in the other; NoKnownGoodError if no good one of the
    replica arrived whole.
    """
    place = normalise_url(url)
    refuse_nested(place, replica.url, f"{place} cannot go on from {replica.url}")
    if "://" not in place:
        with translated("", place):
            os.makedirs(place, exist_ok=True)
    target = open_run(place, settings, must_exist=False)
    _refuse_unless_lost(replica, target, step)
    started = bring_back(replica, target, settings, step=step, scanner=scanner, progress=progress)
    if step is not None:
        leave_behind(replica, target, step)
    return started


def bring_back(
    replica: Run,
    target: Run,
    settings: Settings,
    *,
    series: str | None = None,
    step: int | None = None,
    before_step: int | None = None,
    scanner: Scanner = scan_files,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Started:
    """The same for a run of the replica's lineage, or one without records. Older good ones stand in for one that is
    found damaged."""
    history = load_history(target)
    candidates = replica_candidates(replica, history, before_step=before_step, series=series)
    candidates = [c for c in candidates if step is None or c.key[0] == step]
    if not candidates:
        raise NoKnownGoodError(f"{replica.url} has no known-good checkpoint" + ("" if step is None else f" {step}"))
    join(replica, target)
    mirror_decisions(replica, target)
    mirror_history(replica, target, [c.manifest for c in candidates])
    pace = pace_of(settings.replica_rate, stop, progress)
    troubles: list[str] = []
    with InUse(replica, "restore") as in_use:
        for candidate in candidates:
            in_use.pin(candidate.answer.series, candidate.key)
            try:
                mirror_beside(replica, target, candidate.manifest)
                delivery = send_checkpoint(replica, target, candidate, settings, scanner=scanner, pace=pace, heal=True)
            except StoppedError:
                raise
            except CouldNotTellError as error:
                troubles.append(error.message)
                continue
            if delivery.done in ("damaged", "raced"):
                troubles.append(delivery.message or delivery.done)
                continue
            if troubles:
                better, got = candidates[0].answer.id, candidate.answer.id
                _log.warning("%s could not be had from %s: %s; %s is taken", better, replica.url, troubles[0], got)
            mirror_history(replica, target, [candidate.manifest])
            return _started(replica, target, candidate, delivery.sent)
    raise NoKnownGoodError(f"nothing good came from {replica.url}: {troubles[0]}")


def regain(run: Run, settings: Settings, *, series: str | None = None) -> Started | None:
    """Bring back the newest known-good checkpoint that the run has lost, from the nearest replica that has it whole.
    None if the run has lost nothing that a replica could give back."""
    if not settings.replicas:
        return None
    history = load_history(run)
    own = known_good_candidates(run, history, series=series, most=1)
    if own and has_newest(history, own[0].answer.series, own[0].key, only=series):
        return None
    for replica in open_replicas(run, settings):
        try:
            there = replica_candidates(replica, history, series=series)
            if there and (not own or order_of(there[0]) > order_of(own[0])):
                return bring_back(replica, run, settings, series=series)
        except CkptguardError as error:
            _log.warning("nothing could be brought back from %s: %s", replica.url, error.message)
    return None


def regain_before(
    run: Run, settings: Settings, *, before_step: int, series: str, stop: threading.Event | None = None
) -> Started | None:
    """Bring back a known-good checkpoint from before a step, for a run that has none left: the newest of the nearest
    replica that has one whole. None if none has. StoppedError if `stop` was set before it was there."""
    for replica in open_replicas(run, settings):
        try:
            return bring_back(replica, run, settings, series=series, before_step=before_step, stop=stop)
        except StoppedError:
            raise
        except CkptguardError as error:
            _log.warning("nothing could be brought back from %s: %s", replica.url, error.message)
    return None


def _refuse_unless_lost(replica: Run, target: Run, step: int | None) -> None:
    """Only what is empty is filled, and what was begun from this very replica and has no good checkpoint yet, or only
    that of `step`: its beginning may have been cut short."""
    lineage = read_lineage(target)
    if lineage is not None and lineage == read_lineage(replica):
        own = known_good_candidates(target, load_history(target), most=1)
        if own and (step is None or own[0].key[0] != step):
            raise SettingsError(
                f"{target.url} holds a known-good checkpoint of this training", hint="training can go on from it"
            )
        return
    try:
        entries = {entry.key for entry in target.storage.list("")}
    except ObjectMissingError:
        return
    if entries - {RECORDS_FOLDER}:  # the records of what is no empty run are those of a stranger, and are refused too
        raise SettingsError(f"{target.url} is not empty", hint="name an absent or empty folder")


def _started(replica: Run, target: Run, candidate: Candidate, sent: int) -> Started:
    return Started(
        run=target.url,
        source=replica.url,
        path=target.usable(candidate.manifest.path),
        series=candidate.answer.series,
        step=candidate.key[0],
        id=candidate.answer.id,
        bytes=candidate.manifest.bytes,
        sent=sent,
    )
