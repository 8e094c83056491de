"""``ckptguard repair``: put the right bytes back from a copy that has them."""

from __future__ import annotations

import os

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import say_lines
from ckptguard.terminal.output import emit, is_quiet, say_errors
from ckptguard.values.exit_codes import ExitCode

CODES = (ExitCode.BAD, ExitCode.NOT_FOUND, ExitCode.BUSY)


@command("repair", "Repair damaged files from a whole copy.", CODES, common="quiet json config records")
@click.argument("run", type=PathOrUrl())
@click.argument("ckpt", required=False, type=PathOrUrl())
@click.option("--dry-run", is_flag=True, help="Say what would be repaired, and from where; write nothing.")
def repair(run: str, ckpt: str | None, dry_run: bool, shared: Shared) -> None:
    """Repair what is known to be damaged in RUN: checkpoints in place, and their kept copies. `ckptguard scrub` finds
    damage. With CKPT (a path, id or step) that one is read first.

    Only damaged files are replaced. Each comes from a copy whose bytes are all as they were sealed. The damaged file
    goes to quarantine. Nothing is replaced while training writes it.
    """
    from ckptguard.documents.done_lines import repair_lines
    from ckptguard.repair.repair import repair
    from ckptguard.runs.target import open_named_run
    from ckptguard.runs.work import Work
    from ckptguard.scan import scanner_of

    settings = shared.settings([run])
    view = open_named_run(run, settings)
    if ckpt is not None and "://" not in ckpt and os.path.lexists(ckpt):
        ckpt = os.path.abspath(ckpt)
    done = repair(view, ckpt, dry_run=dry_run, work=Work(scanner=scanner_of(settings)))
    if shared.as_json:
        emit("repair", done, target=view.run.url)
    else:
        say_lines(repair_lines(done, only_wrong=is_quiet()))
    say_errors(done.could_not_tell)
    left = any(not f.repaired and (f.source is None or not done.dry_run) for f in done.files)
    code = ExitCode.FAILED if done.could_not_tell else ExitCode.GOOD
    raise click.exceptions.Exit(ExitCode.BAD if left or done.still_bad else code)
