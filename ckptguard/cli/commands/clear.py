"""``ckptguard clear``: lift a suspicion, with a reason."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say

CODES = (ExitCode.BAD, ExitCode.NOT_FOUND)


@click.command("clear", cls=Command, codes=CODES, short_help="Lift a suspicion, with a reason.")
@click.argument("run", type=Place())
@click.argument("checkpoint")
@click.option("--reason", required=True, metavar="TEXT", help="Why it is trusted again; it is recorded.")
@shared_options
def command(run: str, checkpoint: str, reason: str, shared: Shared) -> None:
    """Lift SUSPECT from one CHECKPOINT of RUN (its path, id or step), with a recorded reason.

    Damage cannot be cleared.
    """
    from ckptguard.runs.run_view import open_view
    from ckptguard.values.ids import escape
    from ckptguard.verify.clear import clear

    if not reason.strip():
        raise click.BadParameter("it is empty", param_hint="--reason")
    view = open_view(run, shared.settings())
    verdict = clear(view, checkpoint, reason=reason)
    if shared.as_json:
        emit("clear", verdict, "cleared", target=view.run.url)
    else:
        say(f"{verdict.id} of {escape(verdict.series)} is {verdict.outcome.value}")
