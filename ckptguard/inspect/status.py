"""Status: am I protected?"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence

import msgspec

from ckptguard.decisions.at_risk import AtRisk, at_risk, ranks_named
from ckptguard.decisions.fleet_health import is_training, shortest_interval
from ckptguard.decisions.known_good import Standpoint, choose_series
from ckptguard.decisions.protection import GoodCheckpoint, explain, own_copy
from ckptguard.inspect.list_states import CheckpointState, states_by_reader
from ckptguard.records.daemon_record import DaemonRecord, read_daemon_record, surely_ended
from ckptguard.records.incidents import Incident, list_incidents
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.room import RoomProblem, read_room_problem
from ckptguard.records.run import list_records
from ckptguard.records.who_and_when import seconds_of
from ckptguard.replicas.replicate import Replica, replica_standings
from ckptguard.runs.ended import ended_at, ended_words
from ckptguard.runs.find_known_good import KnownGood, openable, presence_of, ranked_candidates
from ckptguard.runs.run_reader import RunReader, remembered
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.values.ids import CheckpointId, escape
from ckptguard.values.run_facts import RunFacts
from ckptguard.values.verdict import Outcome


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run's protection.

    - `protected`: there is a known-good checkpoint, with an independent copy of it or of an older good one of its
      series. If saves wait for a verdict, the run must also be `watched`.
    - `kept_bytes`: the known size of all copies.
    - `changed`: paths that changed since they were read; `outcomes` counts the others.
    - `at_risk`: what would be lost if training died now; None if it does not train.
    - `room`: which copies it lacks because there is no room, and whose copies were released; None if there is room.
    - `daemon`: the record of who guards the run. On another machine it does not prove that the daemon lives.
    """

    run: str
    protected: bool
    explanation: str
    watched: bool
    known_good: KnownGood | None
    known_good_age_seconds: float | None
    pending: tuple[str, ...]
    changed: tuple[str, ...]
    outcomes: dict[str, int]
    last_incident: Incident | None
    daemon: DaemonRecord | None
    kept_kinds: tuple[str, ...]
    kept_bytes: int
    replicas: tuple[Replica, ...] = ()
    at_risk: AtRisk | None = None
    room: RoomProblem | None = None


def status(view: RunView, *, supervised: bool = False) -> Status:
    """Look at the records and the listing of a run, and at those of the settings' replicas; reads no tensor bytes.
    `supervised`: somebody watches the run who leaves no record of it.

    Of checkpoints whose records are unchanged since the last look nothing is read, as for `survey`.
    """
    with remembered(view) as reader:
        states = states_by_reader(view, reader)
        known_good = _known_good(view, reader)
    present = [s for s in states if s.in_place]
    newest = list_incidents(view.run, most=1) or list_incidents(view.run)  # the newest may be damaged
    good = _good(known_good, states)
    daemon = read_daemon_record(view.run)
    replicas = replica_standings(view)
    watched = supervised or (daemon is not None and not surely_ended(daemon))
    waiting = 0 if watched else sum(s.changed or s.outcome is Outcome.PENDING for s in present)
    return Status(
        run=view.run.url,
        protected=own_copy(good) is not None and not waiting,
        explanation=_ended(view) or _unwatched(view.run.url, waiting) or explain(good, view.settings.keep),
        watched=watched,
        known_good=known_good,
        known_good_age_seconds=_age(known_good),
        pending=tuple(s.path for s in present if s.outcome is Outcome.PENDING),
        changed=tuple(s.path for s in present if s.changed),
        outcomes={o.value: sum(s.outcome is o and not s.changed for s in present) for o in Outcome},
        last_incident=newest[-1] if newest else None,
        daemon=daemon,
        kept_kinds=tuple(sorted({s.kept_how for s in states if s.kept_how})),
        kept_bytes=sum(s.kept_bytes or 0 for s in states),
        replicas=replicas,
        room=read_room_problem(view.run),
        at_risk=at_risk(_facts(view, reader, states, replicas), time.time()),
    )


def _ended(view: RunView) -> str | None:
    """Return what to say of a run of which only records are left."""
    if view.entries or not list_records(view.run, MANIFESTS) or ended_at(view.run) is None:
        return None
    return ended_words(view.run.url)


def _facts(
    view: RunView, reader: RunReader, states: Sequence[CheckpointState], replicas: Sequence[Replica]
) -> RunFacts:
    """Return what of a run says how much is at risk. The time of a save is that of its files."""
    saved: dict[str, list[float]] = {}
    safe: list[tuple[float, CheckpointId]] = []
    replicated = {replica.last_good for replica in replicas}
    for state in states:
        checkpoint = view.checkpoint(state.path) if state.in_place else None
        written = checkpoint.written_at / 1e9 if checkpoint is not None else None
        at = written or seconds_of(state.verified_at or "")
        if at is None:
            continue
        saved.setdefault(state.series, []).append(at)
        own = state.kept and state.kept_how != "link"
        if state.id is not None and state.outcome is Outcome.GOOD and (own or state.id in replicated):
            safe.append((at, state.id))
    times = [at for series in saved.values() for at in series]
    interval = shortest_interval(saved)
    last = max(safe, key=lambda one: (one[0], one[1].generation), default=None)
    sealed = reader.sealed(last[1], files=True) if last is not None else None
    safe_at = None if last is None else last[0]
    if safe_at is not None and sealed is not None:  # of what is not in place only the time of its verdict was known
        safe_at = min(safe_at, max((file.mtime_ns / 1e9 for file in sealed.files if file.mtime_ns), default=safe_at))
    return RunFacts(
        url=view.run.url,
        name=view.run.url,
        training=is_training(time.time(), max(times, default=None), interval),
        safe_at=safe_at,
        began_at=min(times, default=None),
        world_size=None if sealed is None else ranks_named(file.path for file in sealed.files),
    )


def _known_good(view: RunView, reader: RunReader) -> KnownGood | None:
    """What `find_known_good` says, by what a reader says of the records."""
    heads: dict[str, tuple[KnownGood, Standpoint]] = {}
    for id in ranked_candidates(view.history):
        verdict = None if id.series in heads else reader.judged(id, files=True)
        sealed = reader.sealed(id, files=True) if verdict and sealed_outcome(verdict) is Outcome.GOOD else None
        if verdict is None or sealed is None:
            continue
        history, path_of = view.history, reader.sealed_path
        found = presence_of(history, id, verdict, sealed, every_copy=False, sure=True, path_of=path_of)
        if found is not None:
            heads[id.series] = (found.answer, sealed.standpoint)
    if not heads:
        return None
    answers = list(heads.values())
    chosen, why = choose_series([standpoint for _, standpoint in answers])
    answer = openable(answers[chosen][0])
    return msgspec.structs.replace(answer, reason=f"{answer.reason}; {why}") if why else answer


def _unwatched(run: str, waiting: int) -> str | None:
    """Why a run is not protected whose newest saves nobody looks at."""
    if not waiting:
        return None
    saves = f"{waiting} saves wait" if waiting > 1 else "1 save waits"
    what = f"start `ckptguard-daemon {shlex.quote(run)}`, or run `ckptguard verify {shlex.quote(run)}`"
    return f"no: {saves} for a verdict, and nothing watches this run; {what}"


def _good(known_good: KnownGood | None, states: Iterable[CheckpointState]) -> list[GoodCheckpoint]:
    """The known-good checkpoint and the good ones of its series before it, the newest first."""
    if known_good is None:
        return []
    own = (s for s in states if s.id == known_good.id or (s.id and s.outcome is Outcome.GOOD))
    found = [(s.id.order, s) for s in own if s.id and s.series == known_good.series]
    before = [one for one in found if one[0] <= known_good.id.order]
    good = [
        GoodCheckpoint(f"{escape(s.path)}{s.id.nth_save if s.id else ''}", s.kept_how or "" if s.kept else "")
        for _, s in sorted(before, key=lambda one: one[0], reverse=True)
    ]
    return good or [GoodCheckpoint(escape(known_good.path), "")]  # it went meanwhile


def _age(known_good: KnownGood | None) -> float | None:
    verified = seconds_of(known_good.verified_at) if known_good is not None else None
    return None if verified is None else round(time.time() - verified, 1)
