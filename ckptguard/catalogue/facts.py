"""What the rows of one run say about it as a whole. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ckptguard.catalogue.look import RunLook
from ckptguard.catalogue.rows import Generation, IncidentRow
from ckptguard.decisions.fleet_health import shortest_interval
from ckptguard.decisions.protection import GoodCheckpoint, explain, own_copy
from ckptguard.values.ids import CheckpointId, escape, name_of_run
from ckptguard.values.run_facts import LastIncident, RunFacts
from ckptguard.values.verdict import Outcome

_LARGEST = 2**53  # bytes of a checkpoint: a sparse file states any size, and sums must stay storable
_OWN = ("copy", "reflink")  # copies that share no bytes with the trainer's files


def facts_of(
    look: RunLook,
    rows: Mapping[CheckpointId, Generation],
    incidents: Iterable[IncidentRow],
    known_good: CheckpointId | None,
) -> RunFacts:
    """Return the facts about a run."""
    found, good = rows.values(), rows.get(known_good) if known_good is not None else None
    protection = _protection(rows, known_good)
    ever_good = {id: row for id, row in rows.items() if row.good}
    saves = [(row.saved_at, row.outcome) for row in found if row.saved_at is not None]
    saves += [(save.written_at, Outcome.PENDING.value) for save in look.waiting if save.written_at is not None]
    newest_at, newest_outcome = max(saves, default=(None, None))
    newest_outcome = _unsealed_head(rows, newest_at) or newest_outcome
    checkpoints, size = _in_place(look, rows)
    known = [row for row in incidents if row.cause is not None]
    back = {row.went_back: row for row in known if row.went_back is not None}.values()
    return RunFacts(
        url=escape(look.url),
        name=escape(name_of_run(look.url)),
        protected=own_copy(protection) is not None,
        explanation=explain(protection, look.keep),
        known_good_step=None if known_good is None else known_good.number,
        known_good_at=None if good is None else good.saved_at,
        safe_at=_newest(row.saved_at for row in ever_good.values() if row.kept in _OWN or row.replicated),
        newest_at=newest_at,
        newest_outcome=newest_outcome,
        save_interval=_interval(look, rows),
        world_size=_world_size(found),
        began_at=min((at for at, _ in saves), default=None),
        checkpoints=checkpoints,
        bytes=size,
        backlog=len(look.waiting),
        backlog_bytes=sum(save.bytes for save in look.waiting),
        waiting_since=min((save.since for save in look.waiting), default=None),
        replicas=look.replicas,
        replicas_behind=len(ever_good) if look.behind is None else look.behind,
        scrubbed_at=min((row.scrubbed_at for row in found if row.scrubbed_at is not None), default=None),
        scrub_interval=look.scrub_interval,
        incidents=_by_cause(known),
        rollbacks=_by_cause(back),
        steps_saved=sum(row.went_back_to or 0 for row in back),
        last_incident=_last_incident(known),
    )


def _protection(rows: Mapping[CheckpointId, Generation], known_good: CheckpointId | None) -> list[GoodCheckpoint]:
    """Return the known-good checkpoint and the good ones of its series before it, the newest first, as `status` does.

    The copy of a checkpoint that is damaged in place counts once nothing is in place any more.
    """
    if known_good is None:
        return []
    ids = [
        id
        for id, row in rows.items()
        if id.series == known_good.series
        and id.order <= known_good.order
        and (id == known_good or row.outcome == Outcome.GOOD.value or (row.good and row.kept and not row.in_place))
    ]
    good = [(rows[id], id) for id in sorted(ids, key=lambda id: id.order, reverse=True)]
    return [GoodCheckpoint(f"{row.path or escape(id.series)}{id.nth_save}", row.kept) for row, id in good]


def _last_incident(known: Sequence[IncidentRow]) -> LastIncident | None:
    if not known:
        return None
    last = max(known, key=lambda row: row.name)
    return LastIncident(name=last.name, cause=last.cause or "", step=last.step, at=last.at, open=last.open)


def _unsealed_head(rows: Mapping[CheckpointId, Generation], newest_at: float | None) -> str | None:
    """Return the outcome of a save at the end of its series that has a verdict and no manifest, so no time of its own:
    an incomplete one. None: nothing like it came after the newest."""
    heads: dict[str, CheckpointId] = {}
    for id, row in rows.items():
        if row.in_place and (id.series not in heads or id.order > heads[id.series].order):
            heads[id.series] = id
    found = [rows[id] for id in heads.values() if rows[id].saved_at is None]
    late = [row for row in found if row.judged_at is not None and row.judged_at >= (newest_at or 0.0)]
    return max(late, key=lambda row: row.judged_at or 0.0).outcome if late else None


def _newest(times: Iterable[float | None]) -> float | None:
    return max((time for time in times if time is not None), default=None)


def _interval(look: RunLook, rows: Mapping[CheckpointId, Generation]) -> float | None:
    """Return the time between two saves, also of those that wait."""
    saved: dict[str, list[float]] = {}
    for id, row in rows.items():
        if row.saved_at is not None:
            saved.setdefault(id.series, []).append(row.saved_at)
    for save in look.waiting:
        if save.written_at is not None:
            saved.setdefault(save.series, []).append(save.written_at)
    return shortest_interval(saved)


def _world_size(rows: Iterable[Generation]) -> int | None:
    stated = [(row.saved_at or 0.0, row.world_size) for row in rows if row.world_size is not None]
    return max(stated)[1] if stated else None


def _in_place(look: RunLook, rows: Mapping[CheckpointId, Generation]) -> tuple[dict[str, int], dict[str, int]]:
    """Count the checkpoints in place and their bytes by outcome."""
    checkpoints, size = Counter[str](), Counter[str]()
    states = [(rows[id].outcome if id in rows else Outcome.PENDING.value, own) for id, own in look.places.items()]
    for outcome, own in [*states, *((Outcome.PENDING.value, save.bytes) for save in look.waiting)]:
        checkpoints[outcome] += 1
        size[outcome] += min(own, _LARGEST)
    return dict(sorted(checkpoints.items())), dict(sorted(size.items()))


def _by_cause(incidents: Iterable[IncidentRow]) -> dict[str, int]:
    return dict(sorted(Counter(row.cause or "" for row in incidents).items()))
