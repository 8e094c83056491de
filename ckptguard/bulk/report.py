"""What is known of one run, for the report of a fleet: from its records and its listing, without reading bytes."""

from __future__ import annotations

from collections import Counter

from ckptguard.bulk.messages import Answer, RunRow, Task
from ckptguard.inspect.list_states import survey
from ckptguard.inspect.status import status
from ckptguard.records.who_and_when import seconds_of
from ckptguard.repair.scrub import due_places
from ckptguard.runs.run_view import open_view
from ckptguard.runs.work import Work
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome


def report_run(task: Task, settings: Settings, work: Work) -> Answer:
    """Return the row of one run."""
    view = open_view(task.url, settings)
    found = status(view)
    outcomes: Counter[str] = Counter()
    bytes: Counter[str] = Counter()
    bad: list[str] = []
    for one in survey(view):
        if not one.in_place:
            continue
        outcome = Outcome.PENDING if one.changed else one.outcome
        outcomes[outcome.value] += 1
        bytes[outcome.value] += one.bytes or 0
        if outcome is Outcome.BAD:
            bad.append(one.path)
    known, read = found.known_good, [one.last for one in due_places(view) if one.last is not None]
    behind = [replica.behind for replica in found.replicas]
    row = RunRow(
        url=view.run.url,
        name=task.name,
        protected="yes" if found.protected else found.explanation.partition(":")[0],
        explanation=found.explanation,
        known_good=known.id if known is not None else None,
        known_good_path=known.path if known is not None else None,
        known_good_at=seconds_of(known.verified_at) if known is not None else None,
        outcomes=dict(outcomes),
        bytes=dict(bytes),
        bad=tuple(bad),
        oldest_read_at=min(read, default=None),
        replicas_behind=None if None in behind else sum(b for b in behind if b is not None),
    )
    return Answer(row=row)
