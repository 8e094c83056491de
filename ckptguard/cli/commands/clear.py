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
    from ckptguard.cli.documents import clear_document
    from ckptguard.records.run import open_run
    from ckptguard.values.ids import checkpoint_id, escape
    from ckptguard.verify.clear import clear

    if not reason.strip():
        raise click.BadParameter("it is empty", param_hint="--reason")
    settings = settings_from(config, records)
    opened = open_run(run, settings)
    verdict = clear(opened, checkpoint, reason=reason)
    if as_json:
        emit(clear_document(opened.url, verdict))
    else:
        name = checkpoint_id(verdict.step, verdict.generation)
        say(f"{name} of {escape(verdict.series)} is {verdict.outcome.value}")
