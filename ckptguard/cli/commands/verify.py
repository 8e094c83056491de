"""``ckptguard verify``: read everything back and judge it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from ckptguard.cli.command import Command, Place, Shared, quiet_option, shared_options
from ckptguard.cli.exit_codes import ExitCode, of_outcomes
from ckptguard.cli.output import bytes_below, emit, escape, is_quiet, log_trouble, say, say_well, trouble, working
from ckptguard.cli.render import cell, print_checked, word

if TYPE_CHECKING:
    from ckptguard.runs.results import Report

ORDER = ("bad", "incomplete", "suspect", "pending", "good")
CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND)
_OF_SETTINGS = ("trust_globals", "allow_nonfinite", "digest", "executor", "workers")


@click.command("verify", cls=Command, codes=CODES, short_help="Read checkpoints, and say which are good.")
@click.argument("target", type=Place())
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Verify only the checkpoint of this step.")
@click.option("--newest", type=click.IntRange(min=1), metavar="N", help="Verify only the N newest checkpoints.")
@click.option("--check-sums", metavar="FILE", help="Compare with this MD5SUMS or SHA256SUMS file too.")
@click.option("--reference", metavar="FILE", help="Expect the tensors, shapes and dtypes of this checkpoint.")
@click.option("--trust-global", "trust_globals", multiple=True, metavar="NAME", help="Accept this name in a pickle.")
@click.option("--allow-nonfinite", multiple=True, metavar="PATTERN", help="Let these tensors hold NaN or Inf.")
@click.option("--digest", type=click.Choice(["md5", "blake3"]), help="With blake3, a known MD5 is not read again.")
@click.option(
    "--executor",
    type=click.Choice(["inline", "threads", "processes"]),
    metavar="HOW",
    help="Read inline, in threads, or in processes.",
)
@click.option("--workers", type=click.IntRange(1, 256), metavar="N", help="Use N threads or processes.")
@click.option("--no-record", is_flag=True, help="Record no verdicts and no incidents.")
@click.option(
    "--wait", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait this long for a save that is being written."
)
@quiet_option
@shared_options
def command(target: str, no_record: bool, shared: Shared, **options: Any) -> None:
    """Read every byte of TARGET, compare it with what is on record, and judge it: good, bad, or something in between.

    TARGET is a run, a checkpoint or a single file. In a run the verdicts are recorded, and a bad save is an incident.
    Anything else is only read.
    """
    from ckptguard.reporting.incidents_of_saves import IncidentsOfSaves
    from ckptguard.scan.scanners import scanner_of
    from ckptguard.verification.selection import Selection
    from ckptguard.verification.target import verify_target

    settings = shared.settings(**{name: options.pop(name) for name in _OF_SETTINGS})
    what = Selection(record=not no_record, **{name: said for name, said in options.items() if said is not None})
    total = bytes_below(target) if what.step is None and what.newest is None else None
    with (
        IncidentsOfSaves(settings, source="cli", log=log_trouble) as incidents,
        scanner_of(settings) as scanner,
        working("verifying", total, scanner=scanner) as work,
    ):
        report = verify_target(target, settings, what, judged=incidents.judged, work=work)
    for note in report.notes:
        trouble(f"warning: {note}")
    if shared.as_json:
        emit("verify", report)
    else:
        print_report(report, incident_of=incidents.run)
    outcomes = [c.outcome for c in report.checkpoints]
    raise click.exceptions.Exit(of_outcomes(outcomes, could_not_tell=report.could_not_tell))


def print_report(report: Report, *, incident_of: str | None) -> None:
    """One line for each checkpoint, its findings below it, and a last line that sums up."""
    for checked in report.checkpoints:
        if not (is_quiet() and checked.outcome.value == "good"):
            print_checked(checked, notices=report.kind != "run" or checked.outcome.value == "pending")
    for sentence in _what_to_do(report, incident_of):
        say(sentence)
    counts = Counter(c.outcome.value for c in report.checkpoints)
    parts = ", ".join(f"{counts[o]} {o}" for o in ORDER if counts[o]) or "no checkpoints"
    tell = say_well if report.outcome.value == "good" else say
    tell(f"{cell(report.target)}: {word(report.outcome.value)} ({parts})")


def _what_to_do(report: Report, incident_of: str | None) -> list[str]:
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
    if incident_of is not None:
        said["incident"] = f"what is known about it: {escape(f'ckptguard incident {shlex.quote(incident_of)}')}"
    return list(said.values())
