"""``ckptguard incidents``: what happened to a run, and what was done about it."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say


@click.command("incidents", cls=Command, short_help="List a run's incidents.", codes=(ExitCode.NOT_FOUND,))
@click.argument("run", type=Place())
@shared_options
def command(run: str, shared: Shared) -> None:
    """List the incidents of RUN, oldest first: when training or a save turned sick, and what was done."""
    from ckptguard.cli.render import table
    from ckptguard.documents.build import fields
    from ckptguard.records.incidents import list_incidents
    from ckptguard.records.run import open_run

    opened = open_run(run, shared.settings())
    found = list_incidents(opened)
    if shared.as_json:
        emit("incidents", target=opened.url, incidents=[fields(i, "line of incidents") for i in found])
        return
    if not found:
        say("there are no incidents")
        return
    rows = [(i.id, i.step, i.cause, i.state, i.actions[-1] if i.actions else i.reason) for i in found]
    table(("incident", "step", "cause", "state", "what"), rows)
