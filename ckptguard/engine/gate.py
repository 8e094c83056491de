"""The gate before a training: it starts only from a checkpoint that is good now, and not forever from the same one.

Gates of several ranks agree: one decides, and the others take its answer from the record of the start.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from ckptguard.decisions.restarts import StartChoice, StartPoint, choose_start, counts_still
from ckptguard.errors import (
    BusyError,
    CkptguardError,
    CouldNotTellError,
    NoKnownGoodError,
    NotGivenBackError,
    ObjectMissingError,
    RecordsError,
    RollbackExhausted,
)
from ckptguard.layouts import Checkpoint
from ckptguard.records.incidents import open_incident
from ckptguard.records.leases import list_trainings
from ckptguard.records.starts import (
    JobStart,
    Start,
    forget_starts,
    last_number,
    list_starts,
    record_start,
    same_job,
    still_goes_on,
)
from ckptguard.records.who_and_when import has_ended, is_here
from ckptguard.recover.roll_back import GoBack, RolledBack, roll_back
from ckptguard.recover.verify_pending import verify_pending
from ckptguard.replicas.start_run import regain
from ckptguard.reporting.open_and_close import close_incident, close_incidents_about
from ckptguard.runs.find_known_good import ANY, KnownGood, Wanted, candidate_of, known_good_candidates, none_found
from ckptguard.runs.history import History, names_alone
from ckptguard.runs.lock import run_lock
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import youngest_age
from ckptguard.runs.work import PLAIN, Work
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest, bytes_digest
from ckptguard.values.own_log import log as _log
from ckptguard.verification.read_known_good import read_known_good

T = TypeVar("T")
_LOCK = "gate.lock"
_LOCK_TRIES = 3
_QUIET_WITHIN = 120.0  # seconds for files to come to rest


class Gated(msgspec.Struct, frozen=True, kw_only=True):
    """What the training starts from; None if nothing was ever saved.

    It is the `attempt`-th of `attempts` starts from there without a new good save. `joined`: another gate of the same
    start had decided. `spent` are the paths of checkpoints with too many starts. `rollback` says what was moved.
    """

    known_good: KnownGood | None = None
    attempt: int = 0
    attempts: int
    joined: bool = False
    spent: tuple[str, ...] = ()
    rollback: RolledBack | None = None


def gate(
    view: RunView,
    *,
    attempts: int,
    require: bool = False,
    dry_run: bool = False,
    job: JobStart | None = None,
    work: Work = PLAIN,
) -> Gated:
    """Make the names that a resume reads show the newest checkpoint that is good now, and record the start.

    A checkpoint from which training was started `attempts` times without a new good save is passed over. Nothing is
    moved while everything in place is good. With `dry_run` nothing is moved or recorded. Inside a scheduler's `job`
    only that job's own starts count, and what its prolog decided about this start stands.

    Raises:
        RollbackExhausted: every good checkpoint has had its attempts. Nothing was moved.
        NoKnownGoodError: nothing is good, or with `require` nothing was saved. Nothing was moved.
        BusyError: training is still writing, or another process holds the run.
        CouldNotTellError: what may be good could not be read.
    """
    if not view.settings.replicas and _is_new(view):  # a folder of ours would keep some trainers from starting
        return _nothing_saved(view, attempts, require)
    seen = last_number(view.run)
    with contextlib.nullcontext() if dry_run else run_lock(view.run, name=_LOCK, timeout=math.inf):
        while True:
            view.forget()
            known, starts = last_number(view.run), list_starts(view.run)
            agreed = None if dry_run else _decided_already(view, starts, seen, attempts, job)
            if agreed is not None:
                return agreed
            if view.settings.replicas and not dry_run:
                read_known_good(view, ANY, work, everything=True)  # what is damaged is to be brought back, too
                regain(view)
            if _is_new(view):
                return _nothing_saved(view, attempts, require)
            _refuse_while_training(view)
            _wait_until_quiet(view)
            counted = [start.point for start in starts if same_job(start, job)]
            done, point = _go_to_best(view, counted, attempts, dry_run=dry_run, work=work)
            if dry_run or record_start(view.run, point, after=known, job=job):
                break
        newer = {start.point.id: _newer(view.history, start.point.id) for start in starts}
        forget_starts(view.run, [] if dry_run else [s for s in starts if not counts_still(s.point, newer)])
        return done


def _is_new(view: RunView) -> bool:
    """True if the run has no checkpoint, and never had one."""
    with contextlib.suppress(ObjectMissingError):  # the folder itself may come with the first save
        if view.checkpoints:
            return False
        if view.listing.unread:
            raise CouldNotTellError(view.listing.unread_notes[0])
    return not names_alone(view.run).series


def _nothing_saved(view: RunView, attempts: int, require: bool) -> Gated:
    if require:
        raise NoKnownGoodError(
            f"nothing was saved into {view.run.url} yet", hint="leave --require out to start from the beginning"
        )
    return Gated(attempts=attempts)


def _decided_already(
    view: RunView, starts: Sequence[Start], seen: int, attempts: int, job: JobStart | None
) -> Gated | None:
    """Return the answer of the gate that has decided about this start, or None.

    Its start was recorded while this gate waited (number above `seen`), or goes on, or is that of the job's prolog.
    """
    counted = [start for start in starts if same_job(start, job)]
    for start in reversed(starts):
        of_prolog = counted[-1:] == [start] and _is_of_prolog(start, job)
        goes_on = still_goes_on(view.run, start) and not _saved_since(view, start)
        if start.number > seen or goes_on or of_prolog:
            candidate = candidate_of(view.history, start.point.id)
            if candidate is not None:
                count = max(1, _choice(view, [start.point], [s.point for s in counted], math.inf).before)
                return Gated(known_good=candidate.answer, attempt=count, attempts=attempts, joined=True)
    return None


def _is_of_prolog(start: Start, job: JobStart | None) -> bool:
    """True if the prolog of this very start of the job, and not a gate inside of the job, decided."""
    return job is not None and not job.prolog and start.job == msgspec.structs.replace(job, prolog=True)


def _saved_since(view: RunView, start: Start) -> bool:
    """True if the training of a start elsewhere came as far as a save. Its gates have all ended, so this is a new
    start."""
    if is_here(start.owner):
        return False  # it certainly lives
    recorded = view.run.records.stat(start.key).mtime_ns
    return recorded is not None and any(c.written_at > recorded for c in view.checkpoints)


def _go_to_best(
    view: RunView, starts: Sequence[StartPoint], attempts: int, *, dry_run: bool, work: Work
) -> tuple[Gated, StartPoint]:
    """Roll back to the best checkpoint that is good now and has attempts left."""
    spent: dict[CheckpointId, StartPoint] = {}
    if not dry_run:
        _patiently(view, lambda: verify_pending(view, work=work))
    while True:
        found = known_good_candidates(view, Wanted(exclude=frozenset(spent)))
        choice = _choice(view, (_point_of(view, candidate.manifest) for candidate in found), starts, attempts)
        spent |= {point.id: point for point in choice.spent}
        paths = tuple(manifest.path for id in spent if (manifest := view.history.manifest(id)))
        why = f"training was started {attempts} times from {paths[0]}, without a new good save" if paths else ""
        back = GoBack(
            reason=why or "a gate found no verdict that stands",
            exclude=frozenset(spent),
            dry_run=dry_run,
            check_writing=False,  # it was waited for
            if_needed=True,
        )
        try:
            done = _patiently(view, partial(roll_back, view, back, work=work))
        except NotGivenBackError:
            raise
        except NoKnownGoodError as error:
            if dry_run and (left := len(verify_pending(view, dry_run=True))):
                raise CouldNotTellError(
                    f"{view.run.url} has nothing good to start from, and {left} of its checkpoints have no verdict yet",
                    hint=f"ckptguard verify {shlex.quote(view.run.url)}",
                ) from error
            if not paths:
                raise _nothing_good(view) from error
            raise RollbackExhausted(
                f"{why}, and no older one is known-good",
                hint=f"find out why training dies; --attempts {attempts + 1} starts from there once more",
            ) from error
        manifest = view.history.manifest(done.known_good.id)
        if manifest is None:
            raise RecordsError(f"the manifest of {done.known_good.path} is gone")
        point = _point_of(view, manifest)
        before = _choice(view, [point], starts, math.inf).before
        if before < attempts:
            break
        spent |= {point.id: point}  # a better one was not good now
    if paths and not dry_run:
        _tell_of(view, why, done)
    return Gated(known_good=done.known_good, attempt=before + 1, attempts=attempts, spent=paths, rollback=done), point


def _choice(view: RunView, points: Iterable[StartPoint], starts: Sequence[StartPoint], attempts: float) -> StartChoice:
    return choose_start(points, starts, {start.id: _newer(view.history, start.id) for start in starts}, most=attempts)


def _point_of(view: RunView, manifest: Manifest) -> StartPoint:
    return StartPoint(
        id=manifest.id,
        newer=_newer(view.history, manifest.id),
        training_step=manifest.training_step,
        content=bytes_digest(manifest.files),
    )


def _newer(history: History, id: CheckpointId) -> int:
    """How many generations of its series after this one were ever good."""
    return sum(other.order > id.order and history.was_good(other) for other in history.current_verdicts(id.series))


def _patiently(view: RunView, act: Callable[[], T]) -> T:
    """Try again while a daemon judges or moves something at this moment. Raises BusyError in the end."""
    for _ in range(_LOCK_TRIES - 1):
        with contextlib.suppress(BusyError):
            return act()
        view.forget()
    return act()


def _refuse_while_training(view: RunView) -> None:
    """Raise BusyError if a guard of this machine certainly trains into the run. Its saves must not be moved."""
    for training in list_trainings(view.run):
        if training.loops and is_here(training.owner) and not has_ended(training.owner):
            raise BusyError(
                f"process {training.owner.pid} is training into {view.run.url}", hint="end it before you start another"
            )


def _wait_until_quiet(view: RunView) -> None:
    """Wait while files were written a moment ago: what a killed training left comes to rest."""
    settle, deadline = view.settings.settle, time.monotonic() + _QUIET_WITHIN
    before = list[object]()
    while recent := list[object](c.signature for c in view.checkpoints if _age(c) < settle):
        if recent == before:
            return
        if time.monotonic() > deadline:
            raise BusyError(f"training is still writing into {view.run.url}", hint="end it before you start another")
        before = recent
        time.sleep(settle)
        view.forget()


def _age(checkpoint: Checkpoint) -> float:
    age = youngest_age(checkpoint)
    return -1.0 if age is None else age


def _nothing_good(view: RunView) -> NoKnownGoodError:
    if next(known_good_candidates(view, Wanted(thinned=True)), None) is not None:
        return none_found(view.run, None)  # which names the good weights
    hint = f"ckptguard verify {shlex.quote(view.run.url)} says why; to start from the beginning, move them away"
    return NoKnownGoodError(f"{view.run.url} holds checkpoints, but none of them is good", hint=hint)


def _tell_of(view: RunView, why: str, done: RolledBack) -> None:
    """Record an incident about a checkpoint from which training dies, with what was done."""
    run, good = view.run, str(done.known_good.id)
    action = f"quarantined {', '.join(done.quarantined)}; went back to {done.known_good.path}"
    try:
        incident = open_incident(run, step=done.training_step, cause="crash", reason=why, evidence={}, source="gate")
        close_incident(run, incident, action=action, known_good=good)
    except CkptguardError as error:
        _log.warning("the incident could not be recorded: %s", error.message)
    close_incidents_about(run, done.quarantined, action=action, known_good=good)
