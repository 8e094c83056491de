"""``ckptguard verify``: read everything back and judge it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Unpack

import click

from ckptguard.cli.command import Command, Place, Shared, json_option, settings_from, settings_options
from ckptguard.cli.exit_codes import ExitCode, of_outcomes
from ckptguard.cli.output import emit, say, trouble
from ckptguard.cli.progress import bytes_below, progress_bar

if TYPE_CHECKING:
    from ckptguard.runs.results import Report

ORDER = ("bad", "incomplete", "suspect", "pending", "good")


class Options(Shared):
    """What may be said beside TARGET."""

    step: int | None
    newest: int | None
    check_sums: str | None
    reference: str | None
    trust_global: tuple[str, ...]
    allow_nonfinite: tuple[str, ...]
    digest: str | None
    executor: str | None
    workers: int | None
    no_record: bool
    wait: float | None


@click.command(
    "verify",
    cls=Command,
    short_help="Read checkpoints back and judge them.",
    codes=(ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND),
)
@click.argument("target", type=Place())
@json_option
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only the checkpoint of this step.")
@click.option("--newest", type=click.IntRange(min=1), metavar="N", help="Only the N newest checkpoints.")
@click.option("--check-sums", metavar="FILE", help="Compare with this MD5SUMS or SHA256SUMS file too.")
@click.option("--reference", metavar="FILE", help="Tensors, shapes and dtypes must be those of this checkpoint.")
@click.option("--trust-global", multiple=True, metavar="NAME", help="Accept this pickled name in a stray file.")
@click.option("--allow-nonfinite", multiple=True, metavar="PATTERN", help="Tensors that may hold NaN or Inf.")
@click.option("--digest", type=click.Choice(["md5", "blake3"]), help="blake3: no MD5 where it is on record already.")
@click.option("--executor", type=click.Choice(["inline", "threads", "processes"]), help="Where to read.")
@click.option("--workers", type=click.IntRange(1, 256), metavar="N", help="Read with N threads or processes at once.")
@click.option("--no-record", is_flag=True, help="Write no verdicts into the run's records.")
@click.option("--wait", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait so long for files to be quiet.")
@settings_options
def command(target: str, **options: Unpack[Options]) -> None:
    """Read TARGET's bytes back, compare them with what is recorded, and judge them.

    TARGET is a run, a checkpoint or a single file. Verdicts of a run are recorded; a stray file or checkpoint is only
    read.
    """
    from ckptguard.runs.work import Work
    from ckptguard.scan.scanners import scanner_of
    from ckptguard.verify.selection import DEFAULT_WAIT, Selection
    from ckptguard.verify.target import verify_target

    flags = {name: options[name] for name in ("allow_nonfinite", "digest", "executor", "workers")}
    settings = settings_from(options["config"], options["records"], trust_globals=options["trust_global"], **flags)
    what = Selection(
        step=options["step"],
        newest=options["newest"],
        record=not options["no_record"],
        check_sums=options["check_sums"],
        reference=options["reference"],
        wait=DEFAULT_WAIT if options["wait"] is None else options["wait"],
    )
    total = bytes_below(target) if what.step is None and what.newest is None else None
    with progress_bar("verifying", total) as advance, scanner_of(settings) as scanner:
        report = verify_target(target, settings, what, work=Work(scanner=scanner, progress=advance))
    for note in report.notes:
        trouble(f"warning: {note}")
    if options["as_json"]:
        from ckptguard.documents.build import document, fields

        emit(document("verify", **fields(report)))
    else:
        print_report(report)
    outcomes = [c.outcome for c in report.checkpoints]
    raise click.exceptions.Exit(of_outcomes(outcomes, could_not_tell=report.could_not_tell))


def print_report(report: Report) -> None:
    """One line for each checkpoint, its findings below it, and a last line that sums up."""
    from ckptguard.cli.render import cell, print_checked, word

    for checked in report.checkpoints:
        print_checked(checked, notices=report.kind != "run" or checked.outcome.value == "pending")
    counts = Counter(c.outcome.value for c in report.checkpoints)
    parts = ", ".join(f"{counts[o]} {o}" for o in ORDER if counts[o]) or "no checkpoints"
    say(f"{cell(report.target)}: {word(report.outcome.value)} ({parts})")
