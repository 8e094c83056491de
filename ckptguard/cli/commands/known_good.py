"""``ckptguard known-good``: the path to go back to, alone on stdout."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, escape, say

CODES = (ExitCode.NOT_FOUND, ExitCode.NO_KNOWN_GOOD)


@click.command("known-good", cls=Command, codes=CODES, short_help="Print the path to go back to.")
@click.argument("run", type=Place())
@click.option("--before-step", type=click.IntRange(min=0), metavar="N", help="Only steps lower than N.")
@click.option("--series", metavar="NAME", help="Only this series, such as checkpoint-#.")
@shared_options
def command(run: str, before_step: int | None, series: str | None, shared: Shared) -> None:
    """Print the path of RUN's last known-good checkpoint, and nothing else.

    What RUN has lost is looked for in the settings' replicas.
    """
    settings = shared.settings()
    if settings.replicas:
        from ckptguard.replicas.replicate import find_known_good_anywhere
        from ckptguard.runs.find_known_good import Wanted
        from ckptguard.runs.run_view import open_view

        view = open_view(run, settings, must_exist=False)
        known_good = find_known_good_anywhere(view, Wanted(before_step=before_step, series=series))
    else:
        from ckptguard.records.run import open_run
        from ckptguard.runs.find_known_good import find_known_good

        known_good = find_known_good(open_run(run, settings), before_step=before_step, series=series)
    if shared.as_json:
        emit("known-good", known_good)
    else:
        say(escape(known_good.path))
