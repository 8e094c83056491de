"""``ckptguard accept``: a deliberate change of keys, shapes or dtypes."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode, of_outcomes
from ckptguard.cli.output import emit
from ckptguard.cli.progress import working

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND, ExitCode.BUSY)


@click.command("accept", cls=Command, codes=CODES, short_help="Accept a deliberate change of the schema.")
@click.argument("run", type=Place())
@click.option(
    "--step", type=click.IntRange(min=0), metavar="N", required=True, help="Whose tensors are right from now on."
)
@shared_options
def command(run: str, step: int, shared: Shared) -> None:
    """Take the tensors, shapes and dtypes of this step of RUN as the reference from now on, and verify it again."""
    from ckptguard.cli.render import print_checked
    from ckptguard.runs.run_view import open_view
    from ckptguard.verify.accept import accept

    view = open_view(run, shared.settings())
    with working("verifying") as work:
        checked = accept(view, step, work=work)
    if shared.as_json:
        emit("accept", target=view.run.url, checkpoint=checked)
    else:
        print_checked(checked)
    raise click.exceptions.Exit(of_outcomes([checked.outcome]))
