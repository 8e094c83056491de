"""``ckptguard accept``: a deliberate change of keys, shapes or dtypes."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, json_option, settings_from, settings_options
from ckptguard.cli.exit_codes import ExitCode, of_outcomes
from ckptguard.cli.output import emit
from ckptguard.cli.progress import progress_bar

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND, ExitCode.BUSY)


@click.command("accept", cls=Command, codes=CODES, short_help="Accept a deliberate change of the schema.")
@click.argument("run", type=Place())
@click.option(
    "--step", type=click.IntRange(min=0), metavar="N", required=True, help="Whose tensors are right from now on."
)
@json_option
@settings_options
def command(run: str, step: int, as_json: bool, config: str | None, records: str | None) -> None:
    """Take the tensors, shapes and dtypes of this step of RUN as the reference from now on, and verify it again."""
    from ckptguard.cli.render import print_checked
    from ckptguard.documents.build import document
    from ckptguard.runs.run_view import open_view
    from ckptguard.runs.work import Work
    from ckptguard.verify.user_decisions import accept

    view = open_view(run, settings_from(config, records))
    with progress_bar("verifying") as advance:
        checked = accept(view, step, work=Work(progress=advance))
    if as_json:
        emit(document("accept", target=view.run.url, checkpoint=checked))
    else:
        print_checked(checked)
    raise click.exceptions.Exit(of_outcomes([checked.outcome]))
