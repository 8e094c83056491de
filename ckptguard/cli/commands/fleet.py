"""``ckptguard fleet``: the same for all runs of a fleet, by the workers of an engine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptguard.cli.command import RATE, SPAN, PathOrUrl, Shared, command
from ckptguard.cli.render import age, cell, print_findings, say_lines, size, table, word
from ckptguard.terminal.output import (
    emit,
    escape,
    is_quiet,
    log_trouble,
    progress_bar,
    say,
    say_errors,
    say_well,
    trouble,
    warn,
)
from ckptguard.values.exit_codes import ExitCode, of_outcomes

if TYPE_CHECKING:
    from ckptguard.bulk.engine import Engine
    from ckptguard.bulk.job import BulkDone, BulkPlan, Cost, RunRow
    from ckptguard.fleet.find_runs import FleetRun
    from ckptguard.runs.run_view import RunView

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND)
_ORDER = ("good", "bad", "incomplete", "suspect", "pending")
_LINE_EVERY = 10.0  # seconds between lines of progress where there is no terminal


@command("fleet", "Verify, scrub, replicate, repair or prune many runs.", CODES, common="quiet json config")
@click.argument(
    "verb", type=click.Choice(["verify", "scrub", "replicate", "repair", "prune", "report"]), metavar="VERB"
)
@click.argument("fleet", type=PathOrUrl())
@click.option(
    "--engine",
    metavar="ENGINE",
    help="Work in threads, processes, on dask://HOST:PORT, or by MODULE:FACTORY (without it in threads).",
)
@click.option("--workers", type=click.IntRange(1, 4096), metavar="N", help="Do N tasks at once. Dask counts its own.")
@click.option("--shard", metavar="I/N", help="Do only the runs of shard I of N, from 1/N to N/N: for job arrays.")
@click.option("--rate", type=RATE, help="Read at most this many bytes a second, all workers together: 1GB.")
@click.option("--max-age", type=SPAN, default="7d", help="scrub: skip what was read within SPAN (without it 7d).")
@click.option(
    "--dry-run", is_flag=True, help="Say what is to do and its cost, and stop. 3 if something is on record as bad."
)
def fleet(verb: str, fleet: str, engine: str | None, workers: int | None, shared: Shared, **how: Any) -> None:
    """Do VERB for all runs of FLEET: verify, scrub, replicate, repair, prune or report.

    FLEET is a folder or URL above the runs, or a fleet file. Only what is not on record is done: verify reads what has
    no verdict, replicate sends what is missing. So after an interruption the same command does the rest.
    prune does what the settings of each run say, and the budget of the fleet file.
    Runs without protection come first. A worker that dies costs no verdict: what it read is pending, never bad.
    """
    from ckptguard.bulk.engine import open_engine
    from ckptguard.bulk.job import cost_of, plan_bulk, report_on
    from ckptguard.decisions.bulk_order import shard_of
    from ckptguard.errors import NotFoundError
    from ckptguard.fleet.find_runs import find_runs, folders_of
    from ckptguard.scan.options import workers_of

    rate: float | None = how["rate"]
    if rate is not None and verb in ("repair", "report"):
        raise click.UsageError(f"--rate is not for {verb}")
    if verb == "report" and (engine is not None or workers is not None):
        raise click.UsageError("--engine and --workers are not for report: it reads no checkpoint")
    if verb == "prune" and (engine, workers, rate, how["shard"]) != (None, None, None, None):
        raise click.UsageError("--engine, --workers, --rate and --shard are not for prune: it works run by run")
    shard = _parse_shard(how["shard"])
    dry_run: bool = how["dry_run"]
    settings = shared.settings(folders_of(fleet))
    found = find_runs(fleet, settings, environ=os.environ, say=warn)
    if not found.runs and not found.troubles:
        raise NotFoundError(f"there is no run in {fleet}", hint="name the folder or URL above the runs")
    runs = [run for run in found.runs if shard_of(run.url, shard[1]) == shard[0]]
    if verb == "prune":
        raise click.exceptions.Exit(_prune(fleet, runs, found.troubles, shared, dry_run=dry_run))
    if verb == "report":
        done, cost = report_on(runs), cost_of((), runs, workers=1)
    else:
        with open_engine(engine or "threads", workers or workers_of(0)) as opened:
            plan = plan_bulk(opened, verb, runs, rate=rate, max_age=how["max_age"])
            done, cost = plan.done, plan.cost
            _say_cost(cost, opened.workers, rate, dry_run=dry_run)
            if not dry_run:
                _carry_out(opened, verb, plan)
    done.could_not_tell[:0] = found.troubles
    if shared.as_json:
        emit("fleet", done, target=fleet, verb=verb, shard=how["shard"], dry_run=dry_run, cost=cost)
    elif verb == "report":
        _show_rows(done.rows)
    else:
        _show_wrong(done)
        if not dry_run:
            _show(verb, done)
    warn(*(f"{sentence}; it was put aside" for sentence in done.put_aside))
    say_errors(done.could_not_tell)
    is_empty = shard != (1, 1) and not runs  # the others have the runs
    raise click.exceptions.Exit(_code("" if is_empty else verb, done, dry_run=dry_run))


def _prune(fleet: str, runs: Sequence[FleetRun], troubles: Sequence[str], shared: Shared, *, dry_run: bool) -> ExitCode:
    from ckptguard.documents.build import fields
    from ckptguard.documents.done_lines import prune_lines
    from ckptguard.errors import BusyError, CouldNotTellError
    from ckptguard.fleet.find_runs import budget_of
    from ckptguard.runs.run_view import open_view
    from ckptguard.upkeep.budget import policies_of, prune_and_thin
    from ckptguard.values.retention_policy import parse_span

    opened: list[tuple[FleetRun, RunView]] = []
    wrong, done = list(troubles), []
    for run in runs:
        try:
            opened.append((run, open_view(run.url, run.settings)))
        except CouldNotTellError as error:
            wrong.append(f"{run.url}: {error.message}")
    policies = policies_of([view for _, view in opened], budget_of(fleet))
    for (run, view), policy in zip(opened, policies, strict=True):
        try:
            one = prune_and_thin(view, policy, grace=parse_span(run.settings.trash_grace), dry_run=dry_run)
        except (BusyError, CouldNotTellError) as error:  # the others are pruned
            wrong.append(f"{run.url}: {error.message}")
            continue
        done.append((run, one))
        wrong += [f"{run.url}: {why}" for why in one.could_not_tell]
    if shared.as_json:
        documents = [{"run": run.url, **fields(one)} for run, one in done]
        emit("fleet", verb="prune", target=fleet, runs=documents, could_not_tell=wrong)
    for run, one in done if not shared.as_json and (dry_run or not is_quiet()) else ():
        say(f"{escape(run.name)}:")
        for gone in one.removed:
            say(f"  {cell(gone.checkpoint.path)} ({size(gone.checkpoint.bytes)}): {escape(gone.reasons[0])}")
        say_lines(prune_lines(one))
    say_errors(wrong)
    return ExitCode.FAILED if wrong else ExitCode.GOOD


def _parse_shard(text: str | None) -> tuple[int, int]:
    number, _, shards = (text or "1/1").partition("/")
    if number.isdecimal() and shards.isdecimal() and len(shards) < 7 and 1 <= int(number) <= int(shards):
        return int(number), int(shards)
    raise click.UsageError(f"--shard {escape(str(text))} is none: the shards of 8 are 1/8 to 8/8")


def _carry_out(engine: Engine, verb: str, plan: BulkPlan) -> None:
    """Do what is planned, and show how far it is: by a bar on a terminal, else by a line now and then."""
    from ckptguard.bulk.job import carry_out
    from ckptguard.errors import CkptguardError
    from ckptguard.records.run import open_run
    from ckptguard.reporting.notify import LONGEST_CLOSE, HookSets

    began = said = time.monotonic()
    with contextlib.ExitStack() as stack:
        hooks = HookSets(log_trouble)
        stack.callback(hooks.close, timeout=LONGEST_CLOSE)
        bar = stack.enter_context(progress_bar(verb, plan.cost.bytes))
        for task, answer in carry_out(engine, plan):
            for event in answer.events:
                run = None
                with contextlib.suppress(CkptguardError):  # then it may be told again
                    run = open_run(task.url, plan.settings[task.url])
                hooks.of(plan.settings[task.url]).tell(run, event)
            if bar is not None:
                bar(task.bytes)
            elif not is_quiet() and time.monotonic() - said >= _LINE_EVERY:
                said = time.monotonic()
                trouble(_progress_text(verb, plan, said - began))


def _code(verb: str, done: BulkDone, *, dry_run: bool) -> ExitCode:
    from ckptguard.values.verdict import Outcome

    outcomes = [Outcome(outcome) for outcome, count in done.outcomes.items() if count]
    nothing = not outcomes and not done.left and verb not in ("verify", "report")
    if dry_run:  # what is still to be done is no fault, but what is on record as bad is never passed over
        outcomes = [Outcome.BAD if Outcome.BAD in outcomes else Outcome.GOOD]
    if not done.could_not_tell and nothing:
        return ExitCode.GOOD  # nothing was to be done
    return of_outcomes(outcomes, could_not_tell=bool(done.could_not_tell))


def _say_cost(cost: Cost, workers: int, rate: float | None, *, dry_run: bool) -> None:
    if is_quiet():
        return
    speed = f"{size(round(rate))} a second" if rate is not None else "50 MB a second for each"
    trouble(
        f"{cost.checkpoints} to do in {cost.runs} runs: {size(cost.bytes)} in {cost.files} files,"
        f" about {age(cost.seconds)} with {workers} workers at {speed}"
    )
    looks = cost.idle_looks
    if dry_run and looks.requests:
        trouble(
            f"a daemon that guards them makes {looks.requests:,} requests to object stores in an idle month"
            f" (${looks.dollars:,.2f}), for each 1,000 objects of a run"
        )


def _progress_text(verb: str, plan: BulkPlan, seconds: float) -> str:
    done, cost = plan.done, plan.cost
    speed = done.bytes / seconds
    left = f", {age((cost.bytes - done.bytes) / speed)} left" if speed else ""
    return (
        f"{verb}: {done.done} of {cost.checkpoints} done,"
        f" {size(done.bytes)} of {size(cost.bytes)}, {size(round(speed))} a second{left}"
    )


def _show_wrong(done: BulkDone) -> None:
    for one in done.wrong:
        place = f" ({escape(one.place)})" if one.place not in ("", "place") else ""
        say(f"{word(one.outcome.value, 10)} {cell(one.run)}/{cell(one.path)}{place}  {size(one.bytes)}")
        print_findings((f for f in one.findings if f.severity.value in ("error", "sickness")), one.path)
        if one.message:
            say(f"  {escape(one.message)}")


def _show(verb: str, done: BulkDone) -> None:
    counts = ", ".join(f"{done.outcomes[o]} {o}" for o in _ORDER if done.outcomes.get(o)) or "nothing to do"
    left = f"; {done.left} left: run the same command again" if done.left else ""
    gone = f", {done.gone} gone meanwhile" if done.gone else ""
    tell = say if done.left or done.wrong else say_well
    tell(f"{verb}: {counts}{gone} ({done.done} done now, {size(done.bytes)} in {age(done.seconds)}){left}")


def _show_rows(rows: Sequence[RunRow]) -> None:
    from ckptguard.documents.done_lines import silenced_mark

    now = time.time()
    shown = [row for row in rows if not is_quiet() or row.protected != "yes" or row.bad]
    if not shown:
        say_well("no runs")
        return
    titles = ("run", "protected", "known good", "saved", *_ORDER, "size", "oldest read")
    table(
        titles,
        [
            (
                row.name,
                row.protected + silenced_mark(row.silence),
                row.known_good_path and row.known_good_path.removeprefix(f"{row.url}/"),
                None if row.known_good_at is None else f"{age(now - row.known_good_at)} ago",
                *(row.outcomes.get(outcome, 0) for outcome in _ORDER),
                size(sum(row.bytes.values())),
                None if row.oldest_read_at is None else f"{age(now - row.oldest_read_at)} ago",
            )
            for row in shown
        ],
        right=(*_ORDER, "size"),
    )
