"""A bulk job on a fleet: plan every run, say what it costs, do it, and say what was found. Or report on every run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ckptguard.bulk.dispatch import dispatch
from ckptguard.bulk.engine import Engine
from ckptguard.bulk.messages import Item, Task, TaskAnswer, item_of, trouble_of
from ckptguard.bulk.planning import plan_run
from ckptguard.decisions.bulk_order import seconds_for
from ckptguard.decisions.store_requests import LookCost, cost_of_looks, longest_pause
from ckptguard.errors import WorkerError
from ckptguard.fleet.find_runs import FleetRun
from ckptguard.inspect.status import status
from ckptguard.repair.scrub import due_places
from ckptguard.runs.run_view import open_view
from ckptguard.storage.traits import traits_of_url
from ckptguard.values.ids import CheckpointId, in_number_order
from ckptguard.values.settings import Settings
from ckptguard.values.silence import Silence
from ckptguard.values.verdict import Outcome

LARGE = 2 << 30  # bytes of a checkpoint that several workers scan together
_AT_ONCE = 16  # runs that are looked at side by side


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
        self.done += 1
        self.left -= 1
        self.bytes += task.bytes


class BulkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks in order, and what they cost at the `rate`, in bytes a second for all workers together. `settings` are
    those of each run, by its URL. `done` is the result so far: at first what is on record."""

    tasks: tuple[Task, ...]
    cost: Cost
    rate: float | None
    settings: Mapping[str, Settings]
    done: BulkDone


def plan_bulk(
    engine: Engine,
    verb: str,
    runs: Sequence[FleetRun],
    *,
    rate: float | None = None,
    max_age: float = 0.0,
    large: int = LARGE,
) -> BulkPlan:
    """Find out what a verb has to do in each run. No checkpoint is read.

    A scrub skips what was read within `max_age` seconds. A checkpoint of `large` bytes or more is scanned in parts.
    """
    with ThreadPoolExecutor(_AT_ONCE, "plan") as pool:
        plans = list(pool.map(lambda run: plan_run(verb, run, max_age=max_age, large=large), runs))
    done, tasks = BulkDone(), list[Task]()
    for run, plan in zip(runs, plans, strict=True):
        tasks += (msgspec.structs.replace(task, number=number) for number, task in enumerate(plan.tasks, len(tasks)))
        done.outcomes.update(plan.outcomes)
        done.wrong += plan.wrong
        done.could_not_tell += [f"{run.url}: {plan.trouble}"] if plan.trouble else []
    done.left = len(tasks)
    settings = {run.url: run.settings for run in runs}
    cost = cost_of(tasks, runs, workers=engine.workers, rate=rate)
    return BulkPlan(tasks=tuple(tasks), cost=cost, rate=rate, settings=settings, done=done)


def cost_of(tasks: Sequence[Task], runs: Sequence[FleetRun], *, workers: int, rate: float | None = None) -> Cost:
    """Return what the tasks of these runs cost."""
    total, files = sum(task.bytes for task in tasks), sum(task.file_count for task in tasks)
    return Cost(
        runs=len(runs),
        checkpoints=len(tasks),
        files=files,
        bytes=total,
        seconds=round(seconds_for(total, files, workers=workers, rate=rate), 3),
        idle_looks=cost_of_looks(
            longest_pause(run.settings.scan_interval) for run in runs if traits_of_url(run.url).flat_listing
        ),
    )


def carry_out(engine: Engine, plan: BulkPlan) -> Iterator[tuple[Task, TaskAnswer]]:
    """Do what is planned, add it to `plan.done`, and yield each task with its answer.

    A lost engine ends the job: what has no answer is left, and the next call does it.
    """
    done, began = plan.done, time.monotonic()
    try:
        for task, answer in dispatch(engine, plan.tasks, plan.settings, plan.rate):
            done.add(task, answer)
            yield task, answer
    except WorkerError as error:
        done.could_not_tell.append(trouble_of(error))
    done.put_aside = list(engine.aside.values())
    done.seconds = round(time.monotonic() - began, 3)
    done.wrong.sort(key=lambda item: (item.run, in_number_order(item.path), item.place))


def report_on(runs: Sequence[FleetRun]) -> BulkDone:
    """Return a row for each run, sorted by URL, from the records."""
    began, done = time.monotonic(), BulkDone(done=len(runs))
    with ThreadPoolExecutor(_AT_ONCE, "report") as pool:
        found = list(pool.map(_row_or_trouble, sorted(runs, key=lambda run: run.url)))
    done.rows = [row for row in found if isinstance(row, RunRow)]
    done.could_not_tell = [trouble for trouble in found if isinstance(trouble, str)]
    for row in done.rows:
        done.outcomes.update(row.outcomes)
    done.seconds = round(time.monotonic() - began, 3)
    return done


def _row_or_trouble(run: FleetRun) -> RunRow | str:
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
