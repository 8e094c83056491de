"""``ckptguard clean``: remove our records and copies from a run."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import size, table
from ckptguard.terminal.output import emit, escape, is_quiet, say, say_well, trouble
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.upkeep.clean import Cleaned

CODES = (ExitCode.NOT_FOUND, ExitCode.BUSY)
_WORDS = {
    "kept": "protected copies",
    "quarantine": "in quarantine",
    "trash": "in the trash",
    "training": "random numbers and data positions",
    "records": "verdicts, reports and other records",
}


@command("clean", "Remove ckptguard's records and copies from a run.", CODES, common="quiet json config records")
@click.argument("run", type=PathOrUrl())
@click.option("--everything", is_flag=True, help="Also remove what exists nowhere else.")
@click.option("--cache", is_flag=True, help="Also remove your links to protected copies, in ~/.cache/ckptguard.")
@click.option("--yes", is_flag=True, help="Ask nothing.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
def clean(run: str, everything: bool, cache: bool, yes: bool, dry_run: bool, shared: Shared) -> None:
    """Remove the verdicts, reports and copies that were recorded in RUN. Your checkpoints stay as they are.

    It says how much there is, and asks. A copy of a checkpoint that is nowhere else stays, and the records too, so that
    `ckptguard restore` finds it. Verdicts do not come back: a later `verify` cannot know what was damaged before.

    While a daemon, a training or `supervise` uses RUN, it is refused.
    """
    from ckptguard.runs.run_view import open_view
    from ckptguard.storage.local.linked_view import forget_views
    from ckptguard.supervise.lock_file import is_supervised
    from ckptguard.upkeep.clean import clean

    if not (yes or dry_run) and (shared.as_json or not can_ask()):
        raise click.UsageError("nobody can be asked here: say --yes or --dry-run")
    view = open_view(run, shared.settings([run]), must_exist=False)

    def done(dry_run: bool) -> Cleaned:
        return clean(view, everything=everything, dry_run=dry_run, used=lambda: is_supervised(view.run.url, os.environ))

    found = done(dry_run=dry_run or not yes)
    if not shared.as_json and not is_quiet():
        _show(found)
    if not (yes or dry_run):
        if not click.confirm("Remove it?", err=True):
            trouble("nothing was removed")
            return
        view.forget()
        found = done(dry_run=False)
    links = forget_views(os.environ, dry_run=dry_run) if cache else 0
    if shared.as_json:
        emit("clean", found, target=view.run.url, cached_links=links)
    else:
        verb = "would remove" if dry_run else "removed"
        more = f", and {links} folder{'s' * (links != 1)} of links" if cache else ""
        say_well(f"{verb} {sum(k.files for k in found.removed)} files of {escape(view.run.url)}{more}")


def can_ask() -> bool:
    """Whether somebody can answer."""
    return sys.stdin.isatty()


def _show(found: Cleaned) -> None:
    rows = [(_WORDS[k.kind], k.files, size(k.bytes), "is removed") for k in found.removed]
    rows += [(_WORDS[k.kind], k.files, size(k.bytes), "stays") for k in found.stays]
    table(("what", "files", "size", "decision"), rows, right=("files", "size"))
    if found.stays:
        say("what exists nowhere else stays: `ckptguard restore` copies it out, and --everything removes it")
