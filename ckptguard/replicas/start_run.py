"""Start a run from a replica: its known-good checkpoint, and all records of the training.

The run is new, or its files are lost. Training continues from there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import msgspec

from ckptguard.decisions.known_good import IN_PLACE
from ckptguard.errors import (
    CkptguardError,
    CouldNotTellError,
    NoKnownGoodError,
    ObjectMissingError,
    SettingsError,
    StoppedError,
)
from ckptguard.keep.quarantine import mark_suspect
from ckptguard.records.lineage import read_lineage
from ckptguard.records.pins import InUse
from ckptguard.records.quarantine import Quarantined, mark_moved, mark_quarantined
from ckptguard.records.run import open_run
from ckptguard.records.who_and_when import utc_now
from ckptguard.replicas.mirror_records import join, mirror_beside, mirror_decisions, mirror_history, records_beside
from ckptguard.replicas.replicate import has_newest, known_bad, newer_in_replica, open_replicas, pace_of, refuse_nested
from ckptguard.replicas.send_checkpoint import send_checkpoint
from ckptguard.runs.candidates import Taken, first_whole
from ckptguard.runs.find_known_good import Candidate, SavePart, Wanted, newest_candidate, ranked_candidates
from ckptguard.runs.good_checkpoint import alone
from ckptguard.runs.lock import run_lock
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work
from ckptguard.storage import normalise_url
from ckptguard.storage.failures import translated
from ckptguard.values.ids import RECORDS_FOLDER, CheckpointId
from ckptguard.values.own_log import log as _log
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import Verification, verify_checkpoint


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A run that can continue. `path` is its known-good checkpoint, ready to open; `source` is the replica. `save` are
    all checkpoints of its save, itself too. `bytes` and `sent`, which counts transferred bytes, are of all."""

    run: str
    source: str
    path: str
    id: CheckpointId
    bytes: int
    sent: int
    save: tuple[SavePart, ...]


def start_run(
    replica: RunView, url: str, settings: Settings, *, step: int | None = None, work: Work = PLAIN
) -> Started:
    """Make the run at `url` hold the replica's known-good checkpoint, or that of `step`, in place and verified.

    With `step` training continues from there: the replica's later steps count as rolled back. Without it an older
    checkpoint replaces a damaged one, with a warning. An interrupted start continues.

    Raises:
        SettingsError: the place is not empty, or one place is inside the other.
        NoKnownGoodError: no good checkpoint of the replica arrived whole.
    """
    place = normalise_url(url)
    refuse_nested(place, replica.run.url, f"{place} cannot continue {replica.run.url}")
    if "://" not in place:
        with translated("", place):
            os.makedirs(place, exist_ok=True)
    target = RunView(open_run(place, settings, must_exist=False), settings)
    _refuse_unless_lost(replica, target, step)
    started = bring_back(replica, target, Wanted(step=step), work=work)
    if step is not None:
        mark_later_generations(replica, target, lambda id: (id.number or 0) > step, f"step {step}")
    return started


def bring_back(replica: RunView, target: RunView, wanted: Wanted, *, work: Work = PLAIN) -> Started:
    """The same for a run of the replica's lineage, or one without records. Older good ones replace a damaged one.

    The target's files and records are listed again when next needed.
    """
    known = target.history
    refused = (id for id in ranked_candidates(replica.history, wanted) if known_bad(known, id))
    wanted = msgspec.structs.replace(wanted, exclude=wanted.exclude.union(refused))
    if newest_candidate(replica, wanted) is None:
        which = "" if wanted.step is None else f" {wanted.step}"
        raise NoKnownGoodError(f"{replica.run.url} has no known-good checkpoint{which}")
    join(replica.run, target)
    mirror_decisions(replica.run, target.run)
    mirror_history(replica, target, [id for id in ranked_candidates(replica.history, wanted) if _is_good(replica, id)])
    chosen = _send_first_whole(replica, target, wanted, work)
    got, (sent, freed) = chosen.offered, chosen.result
    if chosen.skipped and chosen.skipped[0].choice.id != got.id:
        better, why = chosen.skipped[0].choice.id, chosen.skipped[0].why
        _log.warning("%s could not be copied from %s: %s; using %s instead", better, replica.run.url, why, got.id)
    paths = {part.id: part.manifest.path for part in got.save}
    mirror_history(replica, target, paths)
    target.forget()
    for path in freed:  # it is newer content of its name now, as after a rollback
        checkpoint = target.checkpoint(path)
        if checkpoint is not None:
            verify_checkpoint(target, checkpoint, Verification(md5=False), work=Work(scanner=work.scanner))
    target.forget()
    return Started(
        run=target.run.url,
        source=replica.run.url,
        path=target.run.usable(got.manifest.path),
        id=got.id,
        bytes=sum(part.manifest.bytes for part in got.save),
        sent=sent,
        save=tuple(
            msgspec.structs.replace(part, path=target.run.usable(paths[part.id]), place=IN_PLACE)
            for part in got.answer.save or (alone(got.answer.path, got.id, IN_PLACE),)
        ),
    )


def _free_fixed_names(replica: RunView, target: RunView, save: Sequence[Candidate]) -> list[str]:
    """Have each fixed name of a save of several, under which nothing lies, be free for what was saved then. What was
    saved under it later is left behind. Returns these names."""
    fixed = {part.id.series: part for part in save if part.id.step is None and len(save) > 1}

    def is_later(id: CheckpointId) -> bool:
        return id.series in fixed and id.order > fixed[id.series].id.order

    known = (id for history in (replica.history, target.history) for name in fixed for id in history.sealed(name))
    left = {id.series for id in known if is_later(id)}
    fixed = {name: fixed[name] for name in left if target.look_again(fixed[name].manifest.path) is None}
    if fixed:
        mark_later_generations(replica, target, is_later, save[0].manifest.path)
    return sorted(part.manifest.path for part in fixed.values())


def _send_first_whole(
    replica: RunView, target: RunView, wanted: Wanted, work: Work
) -> Taken[Candidate, tuple[int, list[str]]]:
    """Send the best save of the replica that arrives whole. The result is how many bytes were sent, and the names that
    were freed for it.

    Raises:
        NoKnownGoodError: none did, and why.
        StoppedError: the work was stopped before one arrived.
    """
    pace, beside = pace_of(work, target.settings), records_beside(replica.run)
    troubles: list[str] = []

    def attempt(candidate: Candidate) -> tuple[int, list[str]] | str:
        sent, freed = 0, _free_fixed_names(replica, target, candidate.save)
        for part in candidate.save:
            in_use.pin(part.id)
        for part in candidate.save:
            try:
                mirror_beside(replica.run, target.run, part.manifest, beside)
                delivery, give_verdict = send_checkpoint(replica, target, part, work=work, pace=pace)
                if give_verdict is not None:
                    give_verdict()
            except CouldNotTellError as error:
                troubles.append(error.message)
                raise
            if delivery.done in ("damaged", "raced"):
                troubles.append(delivery.message or delivery.done)
                return troubles[-1]
            sent += delivery.sent
        return sent, freed

    with InUse(replica.run, "restore") as in_use:
        try:
            return first_whole(replica, attempt, wanted)
        except StoppedError:
            raise
        except (CouldNotTellError, NoKnownGoodError) as error:
            if not troubles:
                raise
            raise NoKnownGoodError(
                f"no good checkpoint could be copied from {replica.run.url}: {troubles[0]}"
            ) from error


def _is_good(replica: RunView, id: CheckpointId) -> bool:
    """True if a generation may be sent. Its record's name decides if it can: the records are sent with it."""
    current_verdict = replica.history.current_verdict(id)
    return (current_verdict is not None and current_verdict.outcome is Outcome.GOOD) or replica.is_good(id)


def regain(view: RunView, *, series: str | None = None) -> Started | None:
    """Bring back the newest known-good checkpoint that the run has lost, from the nearest replica that has it whole.

    None if there is none.
    """
    if not view.settings.replicas:
        return None
    wanted = Wanted(series=series)
    own = newest_candidate(view, wanted)
    if own is not None and has_newest(view.history, own.id, wanted):
        return None
    return regain_before(view, wanted, worth=lambda replica: newer_in_replica(replica, view, wanted, own) is not None)


def regain_before(
    view: RunView,
    wanted: Wanted,
    *,
    stop: threading.Event | None = None,
    worth: Callable[[RunView], bool] = lambda replica: True,
) -> Started | None:
    """Bring back a known-good checkpoint for a run that has no wanted one left.

    It is the newest whole one of the nearest replica that is `worth` it; None if no replica has one. Raises
    StoppedError if `stop` was set before it arrived.
    """
    for replica in open_replicas(view):
        try:
            if worth(replica):
                return bring_back(replica, view, wanted, work=Work(stop=stop))
        except StoppedError:
            raise
        except CkptguardError as error:
            _log.warning("no checkpoint could be copied from %s: %s", replica.run.url, error.message)
    return None


def mark_later_generations(
    replica: RunView, target: RunView, is_later: Callable[[CheckpointId], bool], from_what: str
) -> None:
    """Mark the replica's later generations in `target` as rolled back: good ones become SUSPECT.

    New saves of those steps are new generations. The next replication tells the replica. Use it only for a run in which
    nothing later was saved.
    """
    reason = f"left behind: training was restarted from {from_what}"
    with run_lock(target.run):
        target.refresh()
        there, here = replica.history, target.history
        for series in {*there.names, *here.names}:
            for id in sorted(there.sealed(series), key=lambda id: id.order):
                manifest = there.manifest(id) if is_later(id) else None
                if manifest is None or here.is_quarantined(id):
                    continue
                if here.has_verdict(id):
                    mark_suspect(target, id, reason)
                mark = Quarantined(
                    **msgspec.structs.asdict(id),
                    path=manifest.path,
                    files=(),
                    signature=(),
                    reason=reason,
                    moved_at=utc_now(),
                )
                mark_quarantined(target.run, mark)
                mark_moved(target.run, mark)
        target.refresh()


def _refuse_unless_lost(replica: RunView, target: RunView, step: int | None) -> None:
    """Raise SettingsError unless the target is empty, or an interrupted start from this replica without a good
    checkpoint."""
    lineage = read_lineage(target.run)
    if lineage is not None and lineage == read_lineage(replica.run):
        own = newest_candidate(target)
        if own is not None and (step is None or own.manifest.training_step != step):
            raise SettingsError(
                f"{target.run.url} holds a known-good checkpoint of this training", hint="resume training from it"
            )
        return
    try:
        entries = {entry.key for entry in target.run.storage.list("")}
    except ObjectMissingError:
        return
    if entries - {RECORDS_FOLDER}:  # records beside other files belong to a stranger, and are refused, too
        raise SettingsError(f"{target.run.url} is not empty", hint="name an absent or empty folder")
