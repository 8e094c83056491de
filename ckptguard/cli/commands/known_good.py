"""``ckptguard known-good``: the path to go back to, alone on stdout."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, json_option, settings_from, settings_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say
from ckptguard.values.ids import escape


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
    from ckptguard.cli.documents import known_good_document
    from ckptguard.records.run import open_run
    from ckptguard.replicas.find_replicas import find_known_good_anywhere

    settings = settings_from(config, records)
    exists = not settings.replicas
    opened = open_run(run, settings, must_exist=exists)
    known_good = find_known_good_anywhere(opened, settings, before_step=before_step, series=series)
    if as_json:
        emit(known_good_document(known_good))
    else:
        say(escape(known_good.path))
