"""A bulk job on a fleet: plan every run, say what it costs, do it, and say what was found."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from ckptguard.bulk.dispatch import dispatch
from ckptguard.bulk.engine import Engine
from ckptguard.bulk.messages import Item, RunRow, Table, Task, TaskAnswer, item_of, portable
from ckptguard.bulk.sight import Sight
from ckptguard.decisions.bulk_order import seconds_for
from ckptguard.decisions.store_requests import LookCost, cost_of_looks, longest_pause
from ckptguard.errors import WorkerError
from ckptguard.fleet.find_runs import FleetRun
from ckptguard.storage.traits import traits_of_url
from ckptguard.values.verdict import Outcome

LARGE = 2 << 30  # bytes of a checkpoint that several workers scan together


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a job will read: `seconds` at its rate, else at what workers commonly reach.

    `idle_looks`: what a daemon that guards these runs asks of object stores in a month in which nothing is saved, for
    each 1,000 objects of a run.
    """

    runs: int
    checkpoints: int
    files: int
    bytes: int
    seconds: float
    idle_looks: LookCost


class BulkDone(msgspec.Struct, kw_only=True):
    """The result of a job so far. `outcomes` counts all checkpoints that it is about, also those that needed nothing.

    - `done`: how many were done now; `left`: how many have no answer yet, or never, because the engine was lost.
    - `gone`: how many were removed before they were done.
    - `put_aside`: what was wrong with workers that did not do everything.
    - `wrong`: what is not good. `rows`: the runs of a report. `could_not_tell`: what could not be read or done.
    """

    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    done: int = 0
    left: int = 0
    gone: int = 0
    bytes: int = 0
    seconds: float = 0.0
    put_aside: list[str] = []
    wrong: list[Item] = []
    rows: list[RunRow] = []
    could_not_tell: list[str] = []

    def add(self, task: Task, answer: TaskAnswer) -> None:
        """Count what a task has done."""
        items = list(answer.items)
        if answer.trouble:
            self.could_not_tell.append(f"{'/'.join(filter(None, (task.url, task.path)))}: {answer.trouble}")
            if not items and task.path:
                items = [item_of(task, Outcome.PENDING, message=answer.trouble)]
        self.gone += not items and bool(task.path)
        self.outcomes.update(item.outcome.value for item in items)
        self.wrong += [item for item in items if item.outcome is not Outcome.GOOD]
        if answer.row is not None:
            self.rows.append(answer.row)
            self.outcomes.update(answer.row.outcomes)
        self.done += 1
        self.left -= 1
        self.bytes += task.bytes


class BulkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks in order, and what they cost at the `rate`, in bytes a second for all workers together. `done` is the
    result so far: at first what is on record. `sight`: what workers on other machines must see, too."""

    tasks: tuple[Task, ...]
    cost: Cost
    rate: float | None
    done: BulkDone
    sight: Sight | None


def options_of(runs: Sequence[FleetRun]) -> dict[str, dict[str, Table]]:
    """Return the storage options of runs, for workers on this machine."""
    return {run.url: run.settings.storage.revealed() for run in runs if run.settings.storage}


def plan_bulk(
    engine: Engine,
    verb: str,
    runs: Sequence[FleetRun],
    *,
    rate: float | None = None,
    max_age: float = 0.0,
    large: int = LARGE,
) -> BulkPlan:
    """Ask the workers what a verb has to do in each run. Raises WorkerError if the engine is lost.

    A scrub skips what was read within `max_age` seconds. A checkpoint of `large` bytes or more is scanned in parts.
    """
    asked = [
        Task(
            number=number,
            chain=run.url,
            verb="report" if verb == "report" else "plan",
            about=verb,
            url=run.url,
            name=run.name,
            settings=portable(run.settings),
            storage=run.settings.storage.names,
            max_age=max_age,
            large=large,
        )
        for number, run in enumerate(runs)
    ]
    done = BulkDone()
    sight = None if engine.is_here else Sight(options_of(runs))
    if sight is not None:
        sight.look(asked)
    # A report has one task for each run, and nothing to ask before.
    tasks = asked if verb == "report" else _tasks_found(engine, asked, done, sight)
    done.left, total, files = len(tasks), sum(task.bytes for task in tasks), sum(task.file_count for task in tasks)
    cost = Cost(
        runs=len(runs),
        checkpoints=0 if verb == "report" else len(tasks),
        files=files,
        bytes=total,
        seconds=round(seconds_for(total, files, workers=engine.workers, rate=rate), 3),
        idle_looks=cost_of_looks(
            longest_pause(run.settings.scan_interval) for run in runs if traits_of_url(run.url).flat_listing
        ),
    )
    done.put_aside = list(engine.aside.values())
    return BulkPlan(tasks=tuple(tasks), cost=cost, rate=rate, done=done, sight=sight)


def carry_out(engine: Engine, plan: BulkPlan) -> Iterator[tuple[Task, TaskAnswer]]:
    """Do what is planned, add it to `plan.done`, and yield each task with its answer.

    A lost engine ends the job: what has no answer is left, and the next call does it.
    """
    done, began = plan.done, time.monotonic()
    try:
        for task, answer in dispatch(engine, plan.tasks, plan.rate, plan.sight):
            done.add(task, answer)
            yield task, answer
    except WorkerError as error:
        done.could_not_tell.append(error.message + (f" ({error.hint})" if error.hint else ""))
    done.put_aside = list(engine.aside.values())
    done.seconds = round(time.monotonic() - began, 3)
    done.wrong.sort(key=lambda item: (item.run, item.path, item.place))
    done.rows.sort(key=lambda row: row.url)


def _tasks_found(engine: Engine, asked: Sequence[Task], done: BulkDone, sight: Sight | None) -> list[Task]:
    """Return what is to do in the runs that are asked about. What is on record of them is added to the result."""
    answers = {task.number: answer for task, answer in dispatch(engine, asked, sight=sight)}
    found: list[Task] = []
    for run in asked:
        answer = answers[run.number]
        done.outcomes.update(answer.settled)
        done.wrong += answer.items
        done.could_not_tell += [f"{run.url}: {answer.trouble}"] if answer.trouble else []
        for task in answer.tasks:
            chain, protection = f"{run.url} {task.chain}", answer.protection
            task = msgspec.structs.replace(task, number=len(found), chain=chain, protection=protection)
            found.append(msgspec.structs.replace(task, settings=run.settings, storage=run.storage))
    return found
