"""``ckptguard known-good``: the path to go back to, alone on stdout."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, json_option, settings_from, settings_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, escape, say


@click.command(
    "known-good",
    cls=Command,
    short_help="Print the path to go back to.",
    codes=(ExitCode.NOT_FOUND, ExitCode.NO_KNOWN_GOOD),
)
@click.argument("run", type=Place())
@json_option
@click.option("--before-step", type=click.IntRange(min=0), metavar="N", help="Only steps lower than N.")
@click.option("--series", metavar="NAME", help="Only this series, such as checkpoint-#.")
@settings_options
def command(
    run: str, as_json: bool, before_step: int | None, series: str | None, config: str | None, records: str | None
) -> None:
    """Print the path of RUN's last known-good checkpoint, and nothing else.

    What RUN has lost is looked for in the settings' replicas.
    """
    settings = settings_from(config, records)
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
    if as_json:
        from ckptguard.documents.build import document, fields

        emit(document("known-good", **fields(known_good)))
    else:
        say(escape(known_good.path))
