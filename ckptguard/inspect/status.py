"""Status: am I protected?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import msgspec

from ckptguard.decisions.at_risk import AtRisk, at_risk
from ckptguard.decisions.growth import full_in, unless_room
from ckptguard.decisions.run_summary import in_state, summarize
from ckptguard.inspect.list_states import CheckpointState, states_by_reader
from ckptguard.records.after_seal import late_md5_ids
from ckptguard.records.daemon_record import DaemonRecord, read_daemon_record, surely_ended
from ckptguard.records.incidents import Incident, list_incidents
from ckptguard.records.quarantine import read_quarantined
from ckptguard.records.room import RoomProblem, read_room_problem
from ckptguard.records.silences import read_silence
from ckptguard.records.who_and_when import seconds_of
from ckptguard.replicas.replicate import Replica, furthest_behind, replica_states
from ckptguard.runs.ended import ended_at, ended_words
from ckptguard.runs.find_known_good import KnownGood, full_first, openable
from ckptguard.runs.free_space import free_space
from ckptguard.runs.not_understood import NotUnderstood
from ckptguard.runs.run_reader import RunReader, remembered
from ckptguard.runs.run_view import RunView
from ckptguard.runs.saved_together import RememberedSaves, best_moments
from ckptguard.values.ids import escape, numbers_of
from ckptguard.values.run_rows import FilesInPlace, Generation, RunPlaces, WaitingSave
from ckptguard.values.run_summary import RunSummary
from ckptguard.values.verdict import Outcome


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run's protection.

    - `protected`: there is a known-good checkpoint, with an independent copy of it or of an older good one of its
      series. If saves wait for a verdict, the run must also be `watched`.
    - `kept_bytes`: the known size of all copies.
    - `changed`: paths that changed since they were read; `outcomes` counts the others.
    - `at_risk`: what would be lost if training died now; None if it does not train.
    - `room`: which copies it lacks because there is no room, and whose copies were released; None if there is room.
    - `not_understood`: files that may be state, and that nothing verifies.
    - `newest_bad`: the newest checkpoints in place, as far as none of them is good, in their order.
    - `bad`: paths in place; `summary`: all that the other views of a fleet say of it.
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
    summary: RunSummary
    bad: tuple[str, ...] = ()
    newest_bad: tuple[CheckpointState, ...] = ()
    thinned: tuple[str, ...] = ()
    not_understood: NotUnderstood | None = None


def status(view: RunView, *, supervised: bool = False) -> Status:
    """Look at the records and the listing of a run, and at those of the settings' replicas; reads no tensor bytes.
    `supervised`: somebody watches the run who leaves no record of it.

    Of checkpoints whose records are unchanged since the last look nothing is read, as for `survey`.
    """
    with remembered(view) as reader:
        states = states_by_reader(view, reader)
        known_good = _known_good(view, reader)
        rows = {s.id: _row(view, reader, s) for s in states if s.id is not None}
    takes_md5 = view.settings.digest != "blake3"
    if takes_md5 and any(row.good and not row.md5 for row in rows.values()):
        rows |= {id: msgspec.structs.replace(rows[id], md5="later") for id in late_md5_ids(view.run) & rows.keys()}
    present = [s for s in states if s.in_place]
    newest = list_incidents(view.run, most=1) or list_incidents(view.run)  # the newest may be damaged
    daemon = read_daemon_record(view.run)
    replicas, unread = replica_states(view), view.listing.not_understood
    there = RunPlaces(
        url=view.run.url,
        places={s.id: FilesInPlace(s.bytes or 0) for s in present if s.id is not None and not _waits(s)},
        waiting=tuple(WaitingSave(s.series, s.bytes or 0, _written_at(view, s)) for s in present if _waits(s)),
        watched=supervised or (daemon is not None and not surely_ended(daemon)),
        replicas=len(replicas),
        behind=furthest_behind(replicas),
        replicated=Counter(id for replica in replicas for id in replica.held),
        keep=view.settings.keep,
        takes_md5=takes_md5,
        not_understood=0 if unread is None else unread.files,
        unread=len(view.listing.unread),
    )
    known_good_id = None if known_good is None or known_good.thinned else known_good.id
    summary = summarize(there, rows, (), known_good_id, read_silence(view.run))
    ended = None if ended_at(view) is None else ended_words(view.run.url)
    summary = in_state(_filling(view, summary), time.time(), ended=ended)
    return Status(
        run=view.run.url,
        protected=summary.protected,
        explanation=summary.explanation,
        watched=there.watched,
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
        at_risk=at_risk(summary, time.time()),
        summary=summary,
        bad=tuple(s.path for s in present if s.outcome is Outcome.BAD and not s.changed),
        newest_bad=_newest_bad(view, present) if ended is None else (),
        thinned=tuple(s.path for s in present if s.thinned),
        not_understood=unread,
    )


def _filling(view: RunView, summary: RunSummary) -> RunSummary:
    """Add when the disk is full. A run does not fill it if its budget is used up before."""
    storage = view.run.storage
    free = None if storage.root is None else free_space(storage)  # elsewhere it may cost a request
    budget = view.settings.retention().keep_bytes
    growth = unless_room(summary.growth, free, None if budget is None else budget - sum(summary.bytes.values()))
    return msgspec.structs.replace(summary, free=free, full_in=full_in(free, growth, growth or 0.0))


def _newest_bad(view: RunView, present: Sequence[CheckpointState]) -> tuple[CheckpointState, ...]:
    """Return what was saved after the newest good one in place, of what has a verdict."""
    judged = [s for s in present if not _waits(s)]
    judged.sort(key=lambda s: (_written_at(view, s) or 0.0, numbers_of(s.step), s.path))
    return tuple(reversed(tuple(takewhile(lambda s: s.outcome is not Outcome.GOOD, reversed(judged)))))


def _waits(state: CheckpointState) -> bool:
    return state.changed or state.outcome is Outcome.PENDING


def _written_at(view: RunView, state: CheckpointState) -> float | None:
    checkpoint = view.checkpoint(state.path) if state.in_place else None
    return checkpoint.written_at / 1e9 if checkpoint is not None and checkpoint.written_at else None


def _row(view: RunView, reader: RunReader, state: CheckpointState) -> Generation:
    """Return what the records and the listing say of a save, as the daemon notes it."""
    assert state.id is not None
    row = reader.row(state.id)
    saved_at = row.saved_at if row.path is not None else _written_at(view, state)
    if row.path is None and state.quarantined:
        mark = read_quarantined(view.run, state.id)
        saved_at = mark.written_at if mark is not None else None
    return msgspec.structs.replace(
        row,
        path=escape(state.path),
        outcome=state.outcome.value,
        saved_at=saved_at,
        in_place=state.in_place and not _waits(state),
        kept=state.kept_how or "",
        aside="quarantine" if state.quarantined else "",
    )


def _known_good(view: RunView, reader: RunReader) -> KnownGood | None:
    """What `find_known_good` says, by what a reader says of the records."""
    source = RememberedSaves(reader)
    found = next(full_first(best_moments(source, view.history.series), source.wanted), None)
    return None if found is None else openable(found.answer)


def _age(known_good: KnownGood | None) -> float | None:
    verified = seconds_of(known_good.verified_at) if known_good is not None else None
    return None if verified is None else round(time.time() - verified, 1)
