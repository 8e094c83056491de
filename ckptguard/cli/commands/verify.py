"""``ckptguard verify``: read everything back and judge it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode, of_outcomes
from ckptguard.cli.output import bytes_below, emit, escape, say, trouble, working
from ckptguard.cli.render import cell, print_checked, word

if TYPE_CHECKING:
    from ckptguard.runs.results import Report

ORDER = ("bad", "incomplete", "suspect", "pending", "good")
CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND)
_OF_SETTINGS = ("trust_globals", "allow_nonfinite", "digest", "executor", "workers")


@click.command("verify", cls=Command, codes=CODES, short_help="Read checkpoints back and judge them.")
@click.argument("target", type=Place())
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only the checkpoint of this step.")
@click.option("--newest", type=click.IntRange(min=1), metavar="N", help="Only the N newest checkpoints.")
@click.option("--check-sums", metavar="FILE", help="Compare with this MD5SUMS or SHA256SUMS file too.")
@click.option("--reference", metavar="FILE", help="Tensors, shapes and dtypes must be those of this checkpoint.")
@click.option(
    "--trust-global", "trust_globals", multiple=True, metavar="NAME", help="Accept this pickled name in a stray file."
)
@click.option("--allow-nonfinite", multiple=True, metavar="PATTERN", help="Tensors that may hold NaN or Inf.")
@click.option("--digest", type=click.Choice(["md5", "blake3"]), help="blake3: no MD5 where it is on record already.")
@click.option("--executor", type=click.Choice(["inline", "threads", "processes"]), help="Where to read.")
@click.option("--workers", type=click.IntRange(1, 256), metavar="N", help="Read with N threads or processes at once.")
@click.option("--no-record", is_flag=True, help="Write no verdicts into the run's records.")
@click.option("--wait", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait so long for files to be quiet.")
@shared_options
def command(target: str, no_record: bool, shared: Shared, **options: Any) -> None:
    """Read TARGET's bytes back, compare them with what is recorded, and judge them.

    TARGET is a run, a checkpoint or a single file. Verdicts of a run are recorded; a stray file or checkpoint is only
    read.
    """
    from ckptguard.scan.scanners import scanner_of
    from ckptguard.verification.selection import Selection
    from ckptguard.verification.target import verify_target

    settings = shared.settings(**{name: options.pop(name) for name in _OF_SETTINGS})
    what = Selection(record=not no_record, **{name: said for name, said in options.items() if said is not None})
    total = bytes_below(target) if what.step is None and what.newest is None else None
    with scanner_of(settings) as scanner, working("verifying", total, scanner=scanner) as work:
        report = verify_target(target, settings, what, work=work)
    for note in report.notes:
        trouble(f"warning: {note}")
    if shared.as_json:
        emit("verify", report)
    else:
        print_report(report)
    outcomes = [c.outcome for c in report.checkpoints]
    raise click.exceptions.Exit(of_outcomes(outcomes, could_not_tell=report.could_not_tell))


def print_report(report: Report) -> None:
    """One line for each checkpoint, its findings below it, and a last line that sums up."""
    for checked in report.checkpoints:
        print_checked(checked, notices=report.kind != "run" or checked.outcome.value == "pending")
    for sentence in _what_to_do(report):
        say(sentence)
    counts = Counter(c.outcome.value for c in report.checkpoints)
    parts = ", ".join(f"{counts[o]} {o}" for o in ORDER if counts[o]) or "no checkpoints"
    say(f"{cell(report.target)}: {word(report.outcome.value)} ({parts})")


def _what_to_do(report: Report) -> list[str]:
    """What a user can say to what was found, once for all of it. Of a file that is broken nothing can be said."""
    import shlex  # only where something was found

    said: dict[str, str] = {}
    for checked in report.checkpoints:
        which = f"{shlex.quote(report.target)} {shlex.quote(checked.path)}"
        errors = {f.check for f in checked.findings if f.severity.value == "error"}
        for finding in checked.findings:
            check, severity = finding.check, finding.severity.value
            if severity == "sickness" and not errors and check == "schema":
                said.setdefault(check, f"if other tensors are deliberate: {escape(f'ckptguard accept {which}')}")
            elif severity == "sickness" and not errors:
                said.setdefault("suspicion", f"if all is well: {escape(f'ckptguard clear {which}')} --reason TEXT")
            elif severity == "error" and errors == {check} == {"finite"} and finding.tensor and finding.count:
                option = f"--allow-nonfinite {shlex.quote(finding.tensor)}"
                said.setdefault(check, f"if a tensor must be so: {escape(option)} (or a pattern for several)")
            elif severity == "error" and check == "pickle-safety" and finding.found and "allow-list" in finding.message:
                option = f"--trust-global {shlex.quote(finding.found)}"
                said.setdefault(check, f"if you know what it is: {escape(option)}")
    return list(said.values())
