"""``ckptguard bisect``: where a run turned bad, and in which tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.commands.diff import diff_fields, print_diff
from ckptguard.cli.render import cell, say_lines, say_text, table
from ckptguard.terminal.output import emit, say, warn, working
from ckptguard.values.exit_codes import ExitCode, of_outcomes

if TYPE_CHECKING:
    from ckptguard.inspect.bad_tensors import Culprit
    from ckptguard.inspect.bisect import Bisection

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND, ExitCode.NO_KNOWN_GOOD)
DEFAULT_TOP = 10


@command("bisect", "Find where a run turned bad, and what is wrong.", CODES)
@click.argument("run", type=PathOrUrl())
@click.option("--series", metavar="NAME", help="Look at this series, if several turned bad.")
@click.option("--top", type=click.IntRange(min=0), metavar="N", help="Show at most N tensors of each kind of change.")
@click.option("--no-record", is_flag=True, help="Record no verdicts.")
def bisect(run: str, series: str | None, top: int | None, no_record: bool, shared: Shared) -> None:
    """Find the first bad checkpoint of RUN after a good one, compare the two, and list what is wrong.

    Checkpoints without a verdict are verified first. Damage is listed first, then the tensors that are not finite, in
    the order of the file. In a model that is usually the order of its layers.

    The exit code is 0 if all is good, 3 if something turned bad, and 13 if nothing good came before.
    """
    from ckptguard.documents.build import fields
    from ckptguard.inspect.bisect import bisect_run
    from ckptguard.runs.run_view import open_view

    view = open_view(run, shared.settings([run]))
    with working("reading") as work:
        found = bisect_run(view, series=series, record=not no_record, work=work)
    warn(*dict.fromkeys(found.notes))
    if shared.as_json:
        emit("bisect", **fields(found, diff=found.diff and diff_fields(found.diff, top)))
    else:
        print_bisection(found, DEFAULT_TOP if top is None else top)
    raise click.exceptions.Exit(code_of(found))


def code_of(found: Bisection) -> ExitCode:
    """A run that turned bad is bad; one that never was good has no known-good checkpoint."""
    outcomes = [stage.outcome for stage in found.stages]
    if found.last_good is None and not any(o.value == "good" for o in outcomes):
        return ExitCode.FAILED if found.could_not_tell else ExitCode.NO_KNOWN_GOOD
    return of_outcomes(outcomes, could_not_tell=found.could_not_tell)


def print_bisection(found: Bisection, top: int) -> None:
    """The series step by step, what is wrong, and what else changed."""
    from ckptguard.documents.report_lines import Line

    bad = found.first_bad
    for stage in found.stages:
        mark = " <- last good" if stage == found.last_good else " <- first bad" if stage == bad else ""
        name, outcome = stage.id.nth_save if stage.id else "", stage.outcome.value
        say_lines([Line("", outcome, f"{'':{10 - len(outcome)}} {cell(stage.path)}{name}{mark}")])
    say("")
    if bad is None:
        outcomes = {stage.outcome.value for stage in found.stages}
        say("all are good" if outcomes == {"good"} else "none is bad, but not all are good")
        return
    worst = f"{bad.path}{bad.id.nth_save if bad.id else ''}"
    good = found.last_good
    before = f"{good.path}{good.id.nth_save if good.id else ''}" if good else ""
    say_text(f"It turned bad between {before} and {worst}." if good else f"It is bad from {worst} on.")
    if found.culprits:
        say("")
        many = len({c.file for c in found.culprits}) > 1
        say_text(f"What is wrong in {bad.path}, in the order of the file:")
        say("")
        table(("check", "tensor", "what"), [_row(c, many) for c in found.culprits[:top]])
        if len(found.culprits) > top:
            say(f"... and {len(found.culprits) - top} more (--top {len(found.culprits)})")
        say("")
    if found.diff is not None:
        print_diff(found.diff, top=top)


def _row(culprit: Culprit, with_file: bool) -> tuple[object, ...]:
    what = culprit.message
    if culprit.elements is not None:
        what += f" of {culprit.elements}, first at index {culprit.first_index}"
    where = ": ".join(place for place in (culprit.file if with_file else None, culprit.tensor) if place)
    return culprit.check, where or culprit.file, what
