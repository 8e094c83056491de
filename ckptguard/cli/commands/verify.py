"""``ckptguard verify``: read everything back and judge it."""

from __future__ import annotations

from typing import Any

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode, of_outcomes
from ckptguard.cli.output import bytes_below, emit, trouble, working
from ckptguard.cli.render import say_lines

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
    from ckptguard.documents.report_lines import report_lines
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
        say_lines(report_lines(report))
    outcomes = [c.outcome for c in report.checkpoints]
    raise click.exceptions.Exit(of_outcomes(outcomes, could_not_tell=report.could_not_tell))
