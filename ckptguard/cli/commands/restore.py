"""``ckptguard restore``: copy a checkpoint out, complete and verified, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import size
from ckptguard.terminal.output import emit, escape, is_quiet, say_well, trouble, working
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.recover.restore import Restored, Restoring
    from ckptguard.replicas.start_run import Started

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND, ExitCode.BUSY, ExitCode.NO_KNOWN_GOOD)


@command("restore", "Copy a verified checkpoint out.", CODES, common="quiet json config records")
@click.argument("run", type=PathOrUrl())
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="This step instead of the known-good one.")
@click.option("--to", "dest", type=PathOrUrl(), metavar="DEST", help="An absent or empty folder, or a file to make.")
@click.option(
    "--as-run", type=PathOrUrl(), metavar="RUN", help="Have training go on there: the lost or new run's place."
)
@click.option("--force", is_flag=True, help="Hand out a bad or suspect checkpoint too.")
def restore(run: str, step: int | None, dest: str | None, as_run: str | None, force: bool, shared: Shared) -> None:
    """Copy RUN's known-good checkpoint to DEST/<its own name> and print that path.

    All checkpoints that were saved with it come with it, each under the path that it has in RUN. --json lists them.

    A save of one file becomes the file DEST, if DEST has the same ending, as in --to back.pt. What is going to be made
    is said on stderr first.

    The copy is complete and verified, or there is none. The nearest whole copy of each is taken: in place, kept, then
    in the settings' replicas.

    With --as-run, RUN is a replica. The new run gets the whole save and all records of the training, which goes on from
    there. With --step, later checkpoints stay behind, as in a rollback.
    """
    from ckptguard.recover.restore import restore
    from ckptguard.replicas.start_run import start_run
    from ckptguard.runs.run_view import open_view

    if (dest is None) == (as_run is None):
        raise click.UsageError("say either --to DEST or --as-run RUN")
    if as_run is not None and force:
        raise click.UsageError("--force is not for --as-run: training goes on from good checkpoints alone")
    settings = shared.settings([run] if as_run is None else [run, as_run])
    done: Restored | Started
    with working("restoring") as work:
        if as_run is not None:
            view = open_view(run, settings.of_replica())
            done = start_run(view, as_run, settings, step=step, work=work)
        else:
            assert dest is not None
            view = open_view(run, settings, must_exist=not settings.replicas)
            done = restore(view, dest, step=step, force=force, work=work, tell=_say_what)
    if shared.as_json:
        emit("restore", done, target=view.run.url)
    else:
        say_well(escape(done.path))


def _say_what(plan: Restoring) -> None:
    if is_quiet():
        return
    files = "" if plan.files == 1 else f", {plan.files} files"
    what = " and ".join((plan.path, *plan.beside))
    trouble(f"restoring {what} of {plan.source} ({size(plan.bytes)}{files}) as {plan.made}")
