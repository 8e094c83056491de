"""``ckptguard migrate``: raise the format of a run's records."""

from __future__ import annotations

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.terminal.output import emit, say, say_well
from ckptguard.values.exit_codes import ExitCode

CODES = (ExitCode.NOT_FOUND, ExitCode.BUSY)


@command("migrate", "Raise the format of a run's records.", CODES, common="quiet json config records")
@click.argument("run", type=PathOrUrl())
@click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing.")
def migrate(run: str, dry_run: bool, shared: Shared) -> None:
    """Raise the records of RUN to the format of the setting `records_format`.

    Versions that do not know the format refuse the run from then on. So upgrade everything that uses RUN first. Nothing
    else raises the format, and it cannot be lowered.
    """
    from ckptguard.runs.target import open_named_run
    from ckptguard.upkeep.migrate import migrate

    view = open_named_run(run, shared.settings([run]))
    done = migrate(view.run, dry_run=dry_run)
    if shared.as_json:
        emit("migrate", done, target=view.run.url, dry_run=dry_run)
        return
    tell = say if dry_run else say_well
    if done.to == done.format:
        tell(f"nothing to do: the records have format {done.format}")
        return
    tell(f"format of the records: {done.format} -> {done.to}")
    for change in done.changes:
        tell(f"  {change}")
    tell("run it without --dry-run to raise the format" if dry_run else "the format is raised")
