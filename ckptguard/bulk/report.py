"""The row of one run in a report on a fleet, from its records and its listing. No checkpoint is read."""

from __future__ import annotations

import msgspec

from ckptguard.bulk.messages import trouble_of
from ckptguard.fleet.find_runs import FleetRun
from ckptguard.inspect.status import status
from ckptguard.repair.scrub import due_places
from ckptguard.runs.run_view import open_view
from ckptguard.values.ids import CheckpointId
from ckptguard.values.silence import Silence


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a report. `protected` is "yes", "partly" or "no". Times are in seconds since 1970."""

    url: str
    name: str
    protected: str
    explanation: str
    known_good: CheckpointId | None
    known_good_path: str | None
    known_good_at: float | None
    outcomes: dict[str, int]
    bytes: dict[str, int]
    bad: tuple[str, ...]
    oldest_read_at: float | None
    replicas_behind: int | None
    silence: Silence | None = None


def row_of_run(run: FleetRun) -> RunRow | str:
    """Return what is known of one run, or a sentence that says why nothing is."""
    try:
        return _row(run)
    except Exception as error:  # the other runs have their rows
        return f"{run.url}: {trouble_of(error)}"


def _row(run: FleetRun) -> RunRow:
    view = open_view(run.url, run.settings)
    found = status(view)
    summary, known = found.summary, found.known_good
    read = [one.last for one in due_places(view) if one.last is not None]
    return RunRow(
        url=view.run.url,
        name=run.name,
        protected=summary.explanation.partition(":")[0],
        explanation=summary.explanation,
        known_good=known.id if known is not None else None,
        known_good_path=known.path if known is not None else None,
        known_good_at=summary.known_good_at,
        outcomes=summary.checkpoints,
        bytes=summary.bytes,
        bad=found.bad,
        oldest_read_at=min(read, default=None),
        replicas_behind=None if any(one.behind is None for one in found.replicas) else summary.replicas_behind,
        silence=summary.silence,
    )
