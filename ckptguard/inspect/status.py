"""Status: am I protected?"""

from __future__ import annotations

import datetime

import msgspec

from ckptguard.errors import NoKnownGoodError
from ckptguard.inspect.list_states import CheckpointState, survey
from ckptguard.records.daemon_record import DaemonRecord, read_daemon_record
from ckptguard.records.incidents import Incident, list_incidents
from ckptguard.records.run import Run
from ckptguard.replicas.find_replicas import replica_standings
from ckptguard.replicas.replicate import Replica
from ckptguard.runs.find_known_good import KnownGood, find_known_good
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run's protection. `protected`: there is a known-good checkpoint with a copy of its own.

    `daemon` is the record of who guards the run, not proof that it lives.
    """

    run: str
    protected: bool
    explanation: str
    known_good: KnownGood | None
    known_good_age_seconds: float | None
    pending: tuple[str, ...]
    outcomes: dict[str, int]
    last_incident: Incident | None
    daemon: DaemonRecord | None
    kept_kinds: tuple[str, ...]
    replicas: tuple[Replica, ...] = ()


def status(run: Run, settings: Settings | None = None) -> Status:
    """Look at the records and the listing of a run, and at those of the settings' replicas; reads no tensor bytes."""
    states = survey(run)
    present = [s for s in states if s.in_place]
    try:
        known_good = find_known_good(run)
    except NoKnownGoodError:
        known_good = None
    incidents = list_incidents(run)
    kept = next((s for s in states if known_good and (s.series, s.id) == (known_good.series, known_good.id)), None)
    return Status(
        run=run.url,
        protected=kept is not None and kept.kept,
        explanation=_explain(known_good, kept),
        known_good=known_good,
        known_good_age_seconds=_age(known_good),
        pending=tuple(s.path for s in present if s.outcome is Outcome.PENDING),
        outcomes={o.value: sum(s.outcome is o for s in present) for o in Outcome},
        last_incident=incidents[-1] if incidents else None,
        daemon=read_daemon_record(run),
        kept_kinds=tuple(sorted({s.kept_how for s in states if s.kept_how})),
        replicas=replica_standings(run, settings) if settings is not None else (),
    )


def _explain(known_good: KnownGood | None, state: CheckpointState | None) -> str:
    if known_good is None:
        return "no: there is no known-good checkpoint to go back to"
    if state is None or not state.kept:
        return f"partly: {known_good.id} is known good, but has no copy: rotation or damage can take it"
    if state.kept_how == "link":
        return (
            f"yes: {known_good.id} is known good and survives rotation; its copy is a hard link, which shares"
            ' damage to its blocks (keep = "copy" protects against that too)'
        )
    return f"yes: {known_good.id} is known good and has a copy with bytes of its own ({state.kept_how})"


def _age(known_good: KnownGood | None) -> float | None:
    if known_good is None:
        return None
    try:
        then = datetime.datetime.fromisoformat(known_good.verified_at)
    except ValueError:
        return None
    return round((datetime.datetime.now(datetime.UTC) - then).total_seconds(), 1)
