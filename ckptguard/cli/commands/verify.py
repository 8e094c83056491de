"""``ckptguard verify``: read everything back and judge it."""

from __future__ import annotations

from typing import Any

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import say_lines
from ckptguard.terminal.output import bytes_below, emit, is_quiet, log_trouble, warn, working
from ckptguard.values.exit_codes import ExitCode, of_outcomes

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND)
_OF_SETTINGS = ("trust_globals", "allow_nonfinite", "digest", "workers")


@command("verify", "Read checkpoints, and say which are good.", CODES, common="quiet json config records no_plugins")
@click.argument("target", type=PathOrUrl())
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Verify only the checkpoint of this step.")
@click.option("--newest", type=click.IntRange(min=1), metavar="N", help="Verify only the N newest checkpoints.")
@click.option(
    "--sums", "--check-sums", "check_sums", metavar="FILE", help="Compare with this checksum file, not those in TARGET."
)
@click.option("--reference", metavar="FILE", help="Expect the tensors, shapes and dtypes of this checkpoint.")
@click.option(
    "--trust-global", "trust_globals", multiple=True, metavar="NAME", help="Accept this name in a pickle, or a pattern."
)
@click.option("--allow-nonfinite", multiple=True, metavar="PATTERN", help="Let these tensors hold NaN or Inf.")
@click.option("--digest", type=click.Choice(["md5", "blake3"]), help="With blake3, a known MD5 is not read again.")
@click.option("--workers", type=click.IntRange(1, 256), metavar="N", help="Use N threads.")
@click.option("--no-record", is_flag=True, help="Record no verdicts and no incidents.")
@click.option(
    "--wait", type=click.FloatRange(min=0), metavar="SECONDS", help="Wait this long for a save that is being written."
)
def verify(target: str, no_record: bool, shared: Shared, **options: Any) -> None:
    """Read every byte of TARGET, compare it with what is on record, and judge it: good, bad, or something in between.

    TARGET is a run, a checkpoint or a single file. In a run the verdicts are recorded, and a bad save is an incident.
    Anything else is only read. Checksum files beside what is read (SHA256SUMS, MD5SUMS, model.pt.sha256) are used.
    """
    from ckptguard.documents.report_lines import report_lines
    from ckptguard.reporting.incidents_of_saves import IncidentsOfSaves
    from ckptguard.scan import scanner_of
    from ckptguard.verification.target import Selection, verify_target

    settings = shared.settings([target], **{name: options.pop(name) for name in _OF_SETTINGS})
    what = Selection(record=not no_record, **{name: said for name, said in options.items() if said is not None})
    total = bytes_below(target) if what.step is None and what.newest is None else None
    with (
        IncidentsOfSaves(settings, source="cli", log=log_trouble) as incidents,
        working("verifying", total, scanner=scanner_of(settings)) as work,
    ):
        report = verify_target(target, settings, what, judged=incidents.judged, work=work)
    warn(*report.notes)
    if shared.as_json:
        emit("verify", report)
    else:
        say_lines(report_lines(report, incident_of=incidents.run, only_wrong=is_quiet()))
    outcomes = [c.outcome for c in report.checkpoints]
    raise click.exceptions.Exit(of_outcomes(outcomes, could_not_tell=report.could_not_tell))
