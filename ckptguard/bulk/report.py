"""What is known of one run, for the report of a fleet: from its records and its listing, without reading bytes."""

from __future__ import annotations

from ckptguard.bulk.messages import Answer, RunRow, Task
from ckptguard.inspect.status import status
from ckptguard.repair.scrub import due_places
from ckptguard.runs.run_view import open_view
from ckptguard.runs.work import Work
from ckptguard.values.settings import Settings


def report_run(task: Task, settings: Settings, work: Work) -> Answer:
    """Return the row of one run."""
    view = open_view(task.url, settings)
    found = status(view)
    summary, known = found.summary, found.known_good
    read = [one.last for one in due_places(view) if one.last is not None]
    row = RunRow(
        url=view.run.url,
        name=task.name,
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
    )
    return Answer(row=row)
