"""``ckptguard forget``: remove the records of a run whose checkpoints are gone."""

from __future__ import annotations

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import cell
from ckptguard.terminal.output import emit, say_well
from ckptguard.values.exit_codes import ExitCode

CODES = (ExitCode.NOT_FOUND, ExitCode.BUSY)


@command("forget", "Remove the records of a run that is gone.", CODES, common="quiet json config records")
@click.argument("run", type=PathOrUrl())
@click.option("--force", is_flag=True, help="Also remove the copies of checkpoints in the records.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
def forget(run: str, force: bool, dry_run: bool, shared: Shared) -> None:
    """Remove the records of RUN, if nothing but its records is left. A daemon watches it no longer.

    Use it after a removal that left records behind, and for records elsewhere, which `rm -rf RUN` leaves. While
    checkpoints or other files are in RUN, it refuses. It also refuses while a training uses RUN.
    """
    from ckptguard.retention.forget import forget
    from ckptguard.runs.run_view import open_view

    view = open_view(run, shared.settings([run]), must_exist=False)
    done = forget(view, force=force, dry_run=dry_run)
    if shared.as_json:
        emit("forget", done, target=view.run.url)
    else:
        verb = "would remove" if dry_run else "removed"
        say_well(f"{verb} {done.records} records of {cell(done.run)}, with {done.copies} files of checkpoints")
