"""Status: am I protected?"""

from __future__ import annotations

import time

import msgspec

from ckptguard.decisions.known_good import Standpoint, choose_series
from ckptguard.inspect.list_states import CheckpointState, states_by_glance
from ckptguard.inspect.state_memo import Glance, StateMemo, remembered
from ckptguard.records.daemon_record import DaemonRecord, read_daemon_record
from ckptguard.records.incidents import Incident, list_incidents
from ckptguard.records.who_and_when import seconds_of
from ckptguard.replicas.replicate import Replica, replica_standings
from ckptguard.runs.find_known_good import KnownGood, presence_of, ranked_candidates
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.values.verdict import Outcome


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run's protection. `protected`: there is a known-good checkpoint with a copy of its own. `changed`
    are paths that changed since they were read; `outcomes` counts the others.

    `daemon` is the record of who guards the run, not proof that it lives.
    """

    run: str
    protected: bool
    explanation: str
    known_good: KnownGood | None
    known_good_age_seconds: float | None
    pending: tuple[str, ...]
    changed: tuple[str, ...]
    outcomes: dict[str, int]
    last_incident: Incident | None
    daemon: DaemonRecord | None
    kept_kinds: tuple[str, ...]
    replicas: tuple[Replica, ...] = ()


def status(view: RunView, memo: StateMemo | None = None) -> Status:
    """Look at the records and the listing of a run, and at those of the settings' replicas; reads no tensor bytes.

    Of checkpoints whose records are unchanged since the last look nothing is read, as for `survey`.
    """
    with remembered(view.run, memo) as own:
        glance = Glance(view, own)
        states = states_by_glance(view, glance)
        known_good = _known_good(view, glance)
    present = [s for s in states if s.in_place]
    newest = list_incidents(view.run, most=1) or list_incidents(view.run)  # the newest may be damaged
    kept = next((s for s in states if known_good is not None and s.id == known_good.id), None)
    return Status(
        run=view.run.url,
        protected=kept is not None and kept.kept,
        explanation=_explain(known_good, kept),
        known_good=known_good,
        known_good_age_seconds=_age(known_good),
        pending=tuple(s.path for s in present if s.outcome is Outcome.PENDING),
        changed=tuple(s.path for s in present if s.changed),
        outcomes={o.value: sum(s.outcome is o and not s.changed for s in present) for o in Outcome},
        last_incident=newest[-1] if newest else None,
        daemon=read_daemon_record(view.run),
        kept_kinds=tuple(sorted({s.kept_how for s in states if s.kept_how})),
        replicas=replica_standings(view),
    )


def _known_good(view: RunView, glance: Glance) -> KnownGood | None:
    """What `find_known_good` says, by what a glance tells of the records."""
    heads: dict[str, tuple[KnownGood, Standpoint]] = {}
    for id in ranked_candidates(view.history):
        verdict = None if id.series in heads else glance.judged(id, files=True)
        sealed = glance.sealed(id, files=True) if verdict and sealed_outcome(verdict) is Outcome.GOOD else None
        if verdict is None or sealed is None:
            continue
        history, path_of = view.history, glance.sealed_path
        found = presence_of(history, id, verdict, sealed, every_copy=False, sure=True, path_of=path_of)
        if found is not None:
            heads[id.series] = (found.answer, sealed.standpoint)
    if not heads:
        return None
    answers = list(heads.values())
    chosen, why = choose_series([standpoint for _, standpoint in answers])
    answer = answers[chosen][0]
    return msgspec.structs.replace(answer, reason=f"{answer.reason}; {why}") if why else answer


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
    verified = seconds_of(known_good.verified_at) if known_good is not None else None
    return None if verified is None else round(time.time() - verified, 1)
