"""``ckptguard clear``: lift a suspicion, with a reason."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, json_option, settings_from, settings_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say


@click.command(
    "clear", cls=Command, short_help="Lift a suspicion, with a reason.", codes=(ExitCode.BAD, ExitCode.NOT_FOUND)
)
@click.argument("run", type=Place())
@click.argument("checkpoint")
@click.option("--reason", required=True, metavar="TEXT", help="Why it is trusted again; it is recorded.")
@json_option
@settings_options
def command(run: str, checkpoint: str, reason: str, as_json: bool, config: str | None, records: str | None) -> None:
    """Lift SUSPECT from one CHECKPOINT of RUN (its path, id or step), with a recorded reason.

    Damage cannot be cleared.
    """
    from ckptguard.documents.build import document, fields
    from ckptguard.runs.run_view import open_view
    from ckptguard.values.ids import escape
    from ckptguard.verify.user_decisions import clear

    if not reason.strip():
        raise click.BadParameter("it is empty", param_hint="--reason")
    view = open_view(run, settings_from(config, records))
    verdict = clear(view, checkpoint, reason=reason)
    if as_json:
        emit(document("clear", target=view.run.url, **fields(verdict, "cleared")))
    else:
        say(f"{verdict.id} of {escape(verdict.series)} is {verdict.outcome.value}")
