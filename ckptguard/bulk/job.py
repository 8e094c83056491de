"""A bulk job on a fleet: plan every run, say what it costs, do it, and say what was found."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from ckptguard.bulk.drive import Drive
from ckptguard.bulk.engine import Engine, Held
from ckptguard.bulk.messages import Answer, Item, Planned, RunRow, Table, Task, item_of, portable
from ckptguard.decisions.bulk_order import Job, Waiting, parts_of, seconds_for
from ckptguard.decisions.store_requests import LookCost, cost_of_looks, longest_pause
from ckptguard.errors import WorkerError
from ckptguard.fleet.find_runs import FleetRun
from ckptguard.storage.traits import traits_of_url
from ckptguard.values.verdict import Outcome

LARGE = 2 << 30  # bytes of a checkpoint that several workers scan together
_SHARE = 32  # files with less than this part of `large` bytes are scanned together
VERBS = ("verify", "scrub", "replicate", "repair", "report")


class BulkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with which runs. `rate`: bytes a second for all workers together. `max_age`: a scrub skips what was
    read within these seconds. `large`: from how many bytes on a checkpoint is scanned in parts."""

    verb: str
    runs: tuple[FleetRun, ...]
    rate: float | None = None
    max_age: float = 0.0
    large: int = LARGE


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a job will read: `seconds` at its rate, else at what workers commonly reach.

    `idle_looks`: what a daemon that guards these runs asks of object stores in a month in which nothing is saved, for
    each 1,000 objects of a run.
    """

    runs: int
    checkpoints: int
    bytes: int
    seconds: float
    idle_looks: LookCost


class BulkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks in order, and their jobs. `settled` counts what needs nothing, by outcome; `known` is what of it is not
    good."""

    cost: Cost
    tasks: tuple[Task, ...]
    jobs: tuple[Job, ...]
    settled: dict[str, int] = {}
    known: tuple[Item, ...] = ()
    could_not_tell: tuple[str, ...] = ()


class BulkDone(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job. `outcomes` counts all checkpoints that it was about, also those that needed nothing.

    - `done`: how many were done now; `left`: how many have no answer, because the engine was lost.
    - `wrong`: what is not good. `rows`: the runs of a report. `could_not_tell`: what could not be read or done.
    """

    outcomes: dict[str, int]
    done: int
    left: int
    bytes: int
    seconds: float
    wrong: tuple[Item, ...]
    rows: tuple[RunRow, ...] = ()
    could_not_tell: tuple[str, ...] = ()


class Progress(msgspec.Struct, kw_only=True):
    """How far a job is."""

    checkpoints: int = 0
    bytes: int = 0


Advanced = Callable[[Progress], None]


def held_by(runs: Sequence[FleetRun]) -> Held:
    """Return the storage options of runs, for workers on this machine."""
    return {run.url: run.settings.storage.revealed() for run in runs if run.settings.storage}


def plan_bulk(engine: Engine, order: BulkOrder, advanced: Advanced = lambda progress: None) -> BulkPlan:
    """Ask the workers what there is to do in each run. Raises WorkerError if the engine is lost."""
    first = "report" if order.verb == "report" else "plan"
    begun = [_task_for(run, order, verb=first) for run in order.runs]
    if order.verb == "report":  # one task for each run, and nothing to ask before
        jobs = tuple(Job(number=n, chain=run.url) for n, run in enumerate(order.runs))
        return BulkPlan(cost=_cost(engine, order, jobs, ()), tasks=tuple(begun), jobs=jobs)
    answers: dict[int, Answer] = {}
    progress = Progress()

    def done(job: Job, answer: Answer) -> None:
        answers[job.number] = answer
        progress.checkpoints += len(answer.planned)

    drive = Drive(engine, lambda job: [begun[job.number]], done, tick=lambda: advanced(progress))
    drive.run(Waiting(Job(number=n, chain=run.url) for n, run in enumerate(order.runs)))
    tasks: list[Task] = []
    jobs_: list[Job] = []
    settled: Counter[str] = Counter()
    known: list[Item] = []
    troubles: list[str] = []
    for number, run in enumerate(order.runs):
        answer = answers[number]
        settled.update(answer.settled)
        known += answer.items
        troubles += [f"{run.url}: {answer.trouble}"] if answer.trouble else []
        for planned in answer.planned:
            jobs_.append(
                Job(
                    number=len(tasks),
                    chain=f"{run.url} {planned.chain}",
                    protection=answer.protection,
                    last=planned.last,
                    bytes=planned.bytes,
                )
            )
            tasks.append(_task_for(run, order, verb=order.verb, planned=planned))
    return BulkPlan(
        cost=_cost(engine, order, jobs_, tasks),
        tasks=tuple(tasks),
        jobs=tuple(jobs_),
        settled=dict(settled),
        known=tuple(known),
        could_not_tell=tuple(troubles),
    )


def carry_out(
    engine: Engine,
    order: BulkOrder,
    plan: BulkPlan,
    *,
    advanced: Advanced = lambda progress: None,
    tell: Callable[[FleetRun, Table], None] = lambda run, event: None,
) -> BulkDone:
    """Do what is planned. A lost engine ends the job: what has no answer is left, and the next call does it.

    `advanced` is called about every second, `tell` with each event that people must be told.
    """
    runs = {run.url: run for run in order.runs}
    outcomes, wrong, rows = Counter(plan.settled), list(plan.known), list[RunRow]()
    troubles, progress, began = list(plan.could_not_tell), Progress(), time.monotonic()

    def done(job: Job, answer: Answer) -> None:
        task = plan.tasks[job.number]
        progress.checkpoints += 1
        progress.bytes += job.bytes
        items = list(answer.items)
        if answer.trouble:
            where = "/".join(filter(None, (task.url, task.planned.path if task.planned else "")))
            troubles.append(f"{where}: {answer.trouble}")
            if not items and task.planned is not None and task.planned.path:
                items = [item_of(task, task.planned, Outcome.PENDING, message=answer.trouble)]
        for item in items:
            outcomes[item.outcome.value] += 1
            if item.outcome is not Outcome.GOOD:
                wrong.append(item)
        if answer.row is not None:
            rows.append(answer.row)
            outcomes.update(answer.row.outcomes)
        for event in answer.events:
            tell(runs[task.url], event)

    drive = Drive(
        engine,
        lambda job: _steps(plan.tasks[job.number]),
        done,
        joined=lambda job, answers: _joined(plan.tasks[job.number], answers),
        tick=lambda: advanced(progress),
        rate=order.rate,
    )
    try:
        drive.run(Waiting(plan.jobs))
    except WorkerError as error:
        troubles.append(error.message + (f" ({error.hint})" if error.hint else ""))
    advanced(progress)
    return BulkDone(
        outcomes=dict(outcomes),
        done=progress.checkpoints,
        left=len(plan.jobs) - progress.checkpoints,
        bytes=progress.bytes,
        seconds=round(time.monotonic() - began, 3),
        wrong=tuple(sorted(wrong, key=lambda item: (item.run, item.path, item.place))),
        rows=tuple(sorted(rows, key=lambda row: row.url)),
        could_not_tell=tuple(troubles),
    )


def not_done(plan: BulkPlan) -> BulkDone:
    """Return the result of a plan that is not carried out."""
    return BulkDone(
        outcomes=plan.settled,
        done=0,
        left=len(plan.jobs),
        bytes=0,
        seconds=0.0,
        wrong=plan.known,
        could_not_tell=plan.could_not_tell,
    )


def _cost(engine: Engine, order: BulkOrder, jobs: Sequence[Job], tasks: Sequence[Task]) -> Cost:
    total = sum(job.bytes for job in jobs)
    return Cost(
        runs=len(order.runs),
        checkpoints=len(tasks),
        bytes=total,
        seconds=round(seconds_for(total, workers=engine.workers, rate=order.rate), 3),
        idle_looks=cost_of_looks(
            longest_pause(run.settings.scan_interval) for run in order.runs if traits_of_url(run.url).flat_listing
        ),
    )


def _task_for(run: FleetRun, order: BulkOrder, *, verb: str, planned: Planned | None = None) -> Task:
    return Task(
        verb=verb,
        url=run.url,
        name=run.name,
        settings=portable(run.settings),
        about=order.verb,
        max_age=order.max_age,
        large=order.large,
        planned=planned,
    )


def _steps(task: Task) -> list[Task]:
    """Return the tasks of one job: the parts of a large checkpoint, else the task itself."""
    parts = parts_of(task.planned.files, task.large // _SHARE) if task.planned is not None else []
    if len(parts) < 2:
        return [task]
    return [msgspec.structs.replace(task, verb="scan", files=part) for part in parts]


def _joined(task: Task, answers: Sequence[Answer]) -> Task:
    """Return the task that seals and judges a checkpoint, once all of its parts were scanned."""
    return msgspec.structs.replace(task, scans=tuple(one.scan for one in answers if one.scan is not None))
