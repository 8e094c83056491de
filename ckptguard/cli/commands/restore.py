"""``ckptguard restore``: copy a checkpoint out, complete and verified, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import Command, Place, json_option, settings_from, settings_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say
from ckptguard.cli.progress import progress_bar
from ckptguard.values.ids import escape

if TYPE_CHECKING:
    from ckptguard.values.settings import Settings

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND, ExitCode.BUSY, ExitCode.NO_KNOWN_GOOD)


@click.command("restore", cls=Command, short_help="Copy a verified checkpoint out.", codes=CODES)
@click.argument("run", type=Place())
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="This step instead of the known-good one.")
@click.option("--to", "dest", type=Place(), metavar="DEST", help="An absent or empty folder.")
@click.option("--as-run", type=Place(), metavar="RUN", help="Have training go on there: the lost or new run's place.")
@click.option("--force", is_flag=True, help="Hand out a bad or suspect checkpoint too.")
@json_option
@settings_options
def command(
    run: str,
    step: int | None,
    dest: str | None,
    as_run: str | None,
    force: bool,
    as_json: bool,
    config: str | None,
    records: str | None,
) -> None:
    """Copy RUN's known-good checkpoint to DEST/<its own name> and print that path.

    The copy is complete and verified, or there is none. The nearest whole copy is taken: in place, kept, then in the
    settings' replicas. With --as-run, RUN is a replica, and the checkpoint lies in the new run with all that is on
    record about the training: it goes on from there, and with --step leaves later ones behind, as a rollback does.
    """
    from ckptguard.cli.documents import restore_document
    from ckptguard.records.run import open_run
    from ckptguard.recover.restore import restore

    if (dest is None) == (as_run is None):
        raise click.UsageError("say either --to DEST or --as-run RUN")
    settings = settings_from(config, records)
    if as_run is not None:
        if force:
            raise click.UsageError("--force is not for --as-run: training goes on from good checkpoints alone")
        _start(run, as_run, step, settings, as_json=as_json)
        return
    assert dest is not None
    with progress_bar("restoring") as advance:
        exists = not settings.replicas
        opened = open_run(run, settings, must_exist=exists)
        restored = restore(opened, settings, dest, step=step, force=force, progress=advance)
    if as_json:
        emit(restore_document(opened.url, restored))
    else:
        say(escape(restored.path))


def _start(replica: str, url: str, step: int | None, settings: Settings, *, as_json: bool) -> None:
    from ckptguard.cli.documents_of_replicas import started_document
    from ckptguard.records.run import open_run
    from ckptguard.replicas.start_run import start_from_replica

    with progress_bar("restoring") as advance:
        opened = open_run(replica, settings.of_replica())
        started = start_from_replica(opened, url, settings, step=step, progress=advance)
    if as_json:
        emit(started_document(started))
    else:
        say(escape(started.path))
