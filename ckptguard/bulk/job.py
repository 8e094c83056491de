"""A bulk job on a fleet: plan every run, say what it costs, do it, and say what was found."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from ckptguard.bulk.dispatch import dispatch
from ckptguard.bulk.engine import Engine
from ckptguard.bulk.messages import Answer, Item, RunRow, Table, Task, item_of, portable
from ckptguard.decisions.bulk_order import seconds_for
from ckptguard.decisions.store_requests import LookCost, cost_of_looks, longest_pause
from ckptguard.errors import WorkerError
from ckptguard.fleet.find_runs import FleetRun
from ckptguard.storage.traits import traits_of_url
from ckptguard.values.verdict import Outcome

LARGE = 2 << 30  # bytes of a checkpoint that several workers scan together


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


class BulkDone(msgspec.Struct, kw_only=True):
    """The result of a job so far. `outcomes` counts all checkpoints that it is about, also those that needed nothing.

    - `done`: how many were done now; `left`: how many have no answer yet, or never, because the engine was lost.
    - `wrong`: what is not good. `rows`: the runs of a report. `could_not_tell`: what could not be read or done.
    """

    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    done: int = 0
    left: int = 0
    bytes: int = 0
    seconds: float = 0.0
    wrong: list[Item] = []
    rows: list[RunRow] = []
    could_not_tell: list[str] = []

    def add(self, task: Task, answer: Answer) -> None:
        """Count what a task has done."""
        items = list(answer.items)
        if answer.trouble:
            self.could_not_tell.append(f"{'/'.join(filter(None, (task.url, task.path)))}: {answer.trouble}")
            if not items and task.path:
                items = [item_of(task, Outcome.PENDING, message=answer.trouble)]
        self.outcomes.update(item.outcome.value for item in items)
        self.wrong += [item for item in items if item.outcome is not Outcome.GOOD]
        if answer.row is not None:
            self.rows.append(answer.row)
            self.outcomes.update(answer.row.outcomes)
        self.done += 1
        self.left -= 1
        self.bytes += task.bytes


class BulkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks in order, and what they cost. `done` is the result so far: at first what is on record."""

    cost: Cost
    tasks: tuple[Task, ...]
    done: BulkDone


def options_of(runs: Sequence[FleetRun]) -> dict[str, dict[str, Table]]:
    """Return the storage options of runs, for workers on this machine."""
    return {run.url: run.settings.storage.revealed() for run in runs if run.settings.storage}


def plan_bulk(engine: Engine, order: BulkOrder) -> BulkPlan:
    """Ask the workers what there is to do in each run. Raises WorkerError if the engine is lost."""
    found, known = list[Task](), BulkDone()
    first = [_first_task(number, run, order) for number, run in enumerate(order.runs)]
    if order.verb == "report":  # one task for each run, and nothing to ask before
        found = first
    else:
        answers = {task.number: answer for task, answer in dispatch(engine, first)}
        for asked in first:
            answer = answers[asked.number]
            known.outcomes.update(answer.settled)
            known.wrong += answer.items
            known.could_not_tell += [f"{asked.url}: {answer.trouble}"] if answer.trouble else []
            for task in answer.tasks:
                about = {"settings": asked.settings, "storage": asked.storage, "protection": answer.protection}
                chain = f"{asked.url} {task.chain}"
                found.append(msgspec.structs.replace(task, number=len(found), chain=chain, **about))
    known.left = len(found)
    total = sum(task.bytes for task in found)
    cost = Cost(
        runs=len(order.runs),
        checkpoints=0 if order.verb == "report" else len(found),
        bytes=total,
        seconds=round(seconds_for(total, workers=engine.workers, rate=order.rate), 3),
        idle_looks=cost_of_looks(
            longest_pause(run.settings.scan_interval) for run in order.runs if traits_of_url(run.url).flat_listing
        ),
    )
    return BulkPlan(cost=cost, tasks=tuple(found), done=known)


def carry_out(engine: Engine, plan: BulkPlan, rate: float | None = None) -> Iterator[tuple[Task, Answer]]:
    """Do what is planned, add it to `plan.done`, and yield each task with its answer.

    A lost engine ends the job: what has no answer is left, and the next call does it.
    """
    done, began = plan.done, time.monotonic()
    try:
        for task, answer in dispatch(engine, plan.tasks, rate):
            done.add(task, answer)
            yield task, answer
    except WorkerError as error:
        done.could_not_tell.append(error.message + (f" ({error.hint})" if error.hint else ""))
    done.seconds = round(time.monotonic() - began, 3)
    done.wrong.sort(key=lambda item: (item.run, item.path, item.place))
    done.rows.sort(key=lambda row: row.url)


def _first_task(number: int, run: FleetRun, order: BulkOrder) -> Task:
    """Return the task that says what there is to do in a run, or in a report what is known of it."""
    return Task(
        number=number,
        chain=run.url,
        verb="report" if order.verb == "report" else "plan",
        url=run.url,
        name=run.name,
        settings=portable(run.settings),
        storage=run.settings.storage.names,
        about=order.verb,
        max_age=order.max_age,
        large=order.large,
    )
