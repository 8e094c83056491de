"""``ckptguard restore``: copy a checkpoint out, complete and verified, or not at all."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, json_option, settings_from, settings_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say
from ckptguard.cli.progress import progress_bar
from ckptguard.names import escape

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND, ExitCode.BUSY, ExitCode.NO_KNOWN_GOOD)


@click.command("restore", cls=Command, short_help="Copy a verified checkpoint out.", codes=CODES)
@click.argument("run", type=Place())
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="This step instead of the known-good one.")
@click.option("--to", "dest", required=True, type=Place(), metavar="DEST", help="An absent or empty folder.")
@click.option("--force", is_flag=True, help="Hand out a bad or suspect checkpoint too.")
@json_option
@settings_options
def command(
    run: str, step: int | None, dest: str, force: bool, as_json: bool, config: str | None, records: str | None
) -> None:
    """Copy RUN's known-good checkpoint to DEST/<its own name> and print that path.

    The copy is complete and verified, or there is none.
    """
    from ckptguard.cli.documents import restore_document
    from ckptguard.operations.restore import restore
    from ckptguard.records.run import open_run

    settings = settings_from(config, records)
    with progress_bar("restoring") as advance:
        opened = open_run(run, records=settings.records, patterns=settings.patterns)
        restored = restore(opened, settings, dest, step=step, force=force, progress=advance)
    if as_json:
        emit(restore_document(opened.url, restored))
    else:
        say(escape(restored.path))
