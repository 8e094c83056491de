"""One summary of a run, which `status`, `fleet`, the page, the metrics and the alerts answer from. Pure.

The command makes it from the records, the daemon from its rows.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

import msgspec

from ckptguard.decisions.fleet_health import is_training, shortest_interval
from ckptguard.decisions.growth import growth_of
from ckptguard.values.ids import CheckpointId, escape, name_of_run
from ckptguard.values.run_rows import Generation, IncidentRow, RunPlaces
from ckptguard.values.run_summary import LastIncident, RunSummary
from ckptguard.values.silence import Silence, as_of
from ckptguard.values.verdict import Outcome

NOT_SEEN = "unknown: ckptguard has not looked through this run yet"
_LARGEST = 2**53  # bytes of a checkpoint: a sparse file states any size, and sums must stay storable
_OWN = ("copy", "reflink")  # copies that share no bytes with the trainer's files


def summarize(
    there: RunPlaces,
    rows: Mapping[CheckpointId, Generation],
    incidents: Iterable[IncidentRow],
    known_good: CheckpointId | None,
    silence: Silence | None = None,
) -> RunSummary:
    """Return the summary of a run that is guarded. Of another state `in_state` makes one of it."""
    found, known = rows.values(), [row for row in incidents if row.cause is not None]
    saved_at = _first_saved(rows)
    protected, explanation = _protection(there, _good(rows, known_good))
    saves = [(at, id.series, rows[id]) for id, at in saved_at.items()]
    waits = Generation(name="", in_place=True)
    saves += [(save.written_at, save.series, waits) for save in there.waiting if save.written_at is not None]
    left = [one for one in saves if one[2].aside != "quarantine"]
    newest = max([one for one in left if one[2].in_place] or left, key=itemgetter(0), default=None)
    last = max(saves, key=itemgetter(0), default=None)
    unfinished = max((s.written_at for s in there.waiting if s.unfinished and s.written_at is not None), default=None)
    series: dict[str, list[float]] = {}
    for at, name, _ in saves:
        series.setdefault(name, []).append(at)
    checkpoints, size = _in_place(there, rows)
    ever_good = {id: row for id, row in rows.items() if row.good}
    safe = [id for id, row in ever_good.items() if not row.thinned and (row.kept in _OWN or there.replicated.get(id))]
    ranks = [(saved_at.get(id, 0.0), row.world_size) for id, row in rows.items() if row.world_size is not None]
    back = {row.went_back: row for row in known if row.went_back is not None}.values()
    return RunSummary(
        url=escape(there.url),
        name=escape(name_of_run(there.url)),
        protected=protected,
        explanation=explanation,
        known_good_step=None if known_good is None else known_good.number,
        known_good_at=None if known_good is None else saved_at.get(known_good),
        safe_at=max((saved_at[id] for id in safe if id in saved_at), default=None),
        newest_at=None if newest is None else newest[0],
        newest_outcome=None if newest is None else _outcome(newest[2]),
        trained_at=last[0] if last is not None and last[2].aside != "quarantine" else None,
        saved_at=None if last is None else last[0],
        save_interval=shortest_interval(series),
        world_size=max(ranks)[1] if ranks else None,
        began_at=min((at for at, *_ in saves), default=None),
        checkpoints=checkpoints,
        bytes=size,
        backlog=len(there.waiting),
        backlog_bytes=sum(save.bytes for save in there.waiting),
        waiting_since=min((since for save in there.waiting if (since := save.waits_since)), default=None),
        unfinished_since=unfinished if newest is not None and newest[0] == unfinished else None,
        growth=growth_of((at, _bytes_there(there, id)) for id, at in saved_at.items()),
        not_understood=there.not_understood,
        unreadable=there.unread,
        without_md5=sum(_lacks_md5(row) for row in found) if there.takes_md5 else 0,
        replicas=there.replicas,
        replicas_behind=len(ever_good) if there.behind is None else there.behind,
        scrubbed_at=min((row.scrubbed_at for row in found if row.scrubbed_at is not None), default=None),
        scrub_interval=there.scrub_interval,
        incidents=_by_cause(known),
        rollbacks=_by_cause(back),
        steps_saved=sum(row.went_back_to or 0 for row in back),
        last_incident=_last_incident(known),
        silence=silence,
    )


def in_state(
    summary: RunSummary,
    now: float,
    state: str = "guarded",
    trouble: str | None = None,
    ended: str | None = None,
    saving_stopped: bool | None = None,
) -> RunSummary:
    """Return the summary as of now. `trouble` says why the run cannot be looked at: what was true before may be no
    longer. `ended` says how it ended: nothing of it is at risk, and nothing protected."""
    explanation = summary.explanation or NOT_SEEN
    if trouble is not None and summary.explanation:
        explanation = f"unknown: {escape(trouble)}"
    training = is_training(now, summary.trained_at, summary.save_interval)
    return msgspec.structs.replace(
        summary,
        state="ended" if ended is not None else state,
        protected=summary.protected and trouble is None and ended is None,
        explanation=explanation if ended is None else ended,
        training=training and ended is None,
        saving_stopped=saving_stopped,
        full_in=None if ended is not None else summary.full_in,
        silence=as_of(summary.silence, now),
    )


def last_read(judged: float | None, whole: float | None, made: float | None, *, good: bool) -> float | None:
    """Return when a place was last read whole: by its verdict, a scrub, or the copy that made it. What is not good was
    read again for that verdict."""
    times = (whole, judged if not good or (whole is None and made is None) else made)
    return max((time for time in times if time is not None), default=None)


def _outcome(row: Generation) -> str:
    """Return what a save is where it is: the damage was to files in place, which may be gone."""
    return Outcome.GOOD.value if row.good and not row.in_place else row.outcome


def _lacks_md5(row: Generation) -> bool:
    """True if a whole copy of a good save is there to take its MD5 from, and nobody took it."""
    whole = row.outcome == Outcome.GOOD.value if row.in_place else bool(row.kept)
    return row.good and not row.md5 and row.path is not None and (whole or row.kept in _OWN)


def _first_saved(rows: Mapping[CheckpointId, Generation]) -> dict[CheckpointId, float]:
    """Return when the bytes of each save were first saved. What a rollback put back is as old as it was."""
    first: dict[str, float] = {}
    for row in rows.values():
        if row.saved_at is not None and row.content:
            first[row.content] = min(row.saved_at, first.get(row.content, row.saved_at))
    return {id: first.get(row.content, row.saved_at) for id, row in rows.items() if row.saved_at is not None}


def _good(rows: Mapping[CheckpointId, Generation], known_good: CheckpointId | None) -> list[Generation]:
    """Return the known-good checkpoint and the good ones of its series before it, the newest first.

    The copy of a checkpoint that is damaged in place counts once nothing is in place any more.
    """
    if known_good is None:
        return []
    ids = [
        id
        for id, row in rows.items()
        if id.series == known_good.series
        and id.order <= known_good.order
        and not row.thinned
        and (id == known_good or row.outcome == Outcome.GOOD.value or (row.good and row.kept and not row.in_place))
    ]
    return [rows[id] for id in sorted(ids, key=lambda id: id.order, reverse=True)]


def _protection(there: RunPlaces, good: Sequence[Generation]) -> tuple[bool, str]:
    """Answer "am I protected?", and say why in one sentence. `good` is as above."""
    if there.waiting and not there.watched:
        waiting, run = len(there.waiting), shlex.quote(there.url)
        saves = f"{waiting} saves wait" if waiting > 1 else "1 save waits"
        what = f"start `ckptguard-daemon {run}`, or run `ckptguard verify {run}`"
        return False, f"no: {saves} for a verdict, and nothing watches this run; {what}"
    if not good:
        return False, "no: there is no known-good checkpoint to go back to"
    newest, copy = _name(good[0]), good[0].kept
    own = next((number for number, row in enumerate(good) if row.kept in _OWN), None)
    if own == 0:
        kind = "a full copy" if copy == "copy" else f"an independent copy ({copy})"
        return True, f"yes: {newest} is known good and has {kind}"
    if own is not None:
        lost = f"{own} saves" if own > 1 else "1 save"
        copied = f"{_name(good[own])} has an independent copy"
        return True, f"yes: {copied}; the newer {newest} has none: damage to it would lose {lost}"
    if not copy:
        return False, f"partly: {newest} is known good, but has no copy: rotation or damage can take it"
    why = ' (keep = "link")' if there.keep == "link" else ""
    survives = "survives rotation, but not saving over it: its copy is a hard link"
    return False, f"partly: {newest} is known good and {survives}{why}"


def _name(row: Generation) -> str:
    return f"{row.path or escape(row.id.series)}{row.id.nth_save}"


def _last_incident(known: Sequence[IncidentRow]) -> LastIncident | None:
    if not known:
        return None
    last = max(known, key=lambda row: row.name)
    return LastIncident(name=last.name, cause=last.cause or "", step=last.step, at=last.at, open=last.open)


def _in_place(there: RunPlaces, rows: Mapping[CheckpointId, Generation]) -> tuple[dict[str, int], dict[str, int]]:
    """Count the checkpoints in place and their bytes by outcome."""
    checkpoints, size = Counter[str](), Counter[str]()
    pending = Outcome.PENDING.value
    states = [(rows[id].outcome if id in rows else pending, place.bytes) for id, place in there.places.items()]
    for outcome, bytes in [*states, *((pending, save.bytes) for save in there.waiting)]:
        checkpoints[outcome] += 1
        size[outcome] += min(bytes, _LARGEST)
    return dict(sorted(checkpoints.items())), dict(sorted(size.items()))


def _bytes_there(there: RunPlaces, id: CheckpointId) -> int:
    return min(there.places[id].bytes, _LARGEST) if id in there.places else 0


def _by_cause(incidents: Iterable[IncidentRow]) -> dict[str, int]:
    return dict(sorted(Counter(row.cause or "" for row in incidents).items()))
