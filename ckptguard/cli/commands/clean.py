"""``ckptguard clean``: remove our records and copies from a run."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import size, table
from ckptguard.errors import CkptguardError
from ckptguard.terminal.output import emit, escape, is_quiet, say, say_errors, say_well, trouble, working
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.runs.run_view import RunView
    from ckptguard.upkeep.clean import Cleaned, Right

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
    `ckptguard restore` finds it. Before a copy goes, the files in place are read: what is not as it was verified is
    said, and the copy stays. Verdicts do not come back: a later `verify` cannot know what was damaged before. Saves of
    a TrainingGuard then count as incomplete, until `ckptguard reseal` says that one is whole.

    While a daemon, a training or `supervise` uses RUN, it is refused.
    """
    from ckptguard.runs.run_view import open_view
    from ckptguard.storage.local.linked_view import forget_views
    from ckptguard.supervise.lock_file import is_supervised
    from ckptguard.upkeep.clean import clean

    if not (yes or dry_run) and (shared.as_json or not can_ask()):
        raise click.UsageError("nobody can be asked here: say --yes or --dry-run")
    view = open_view(run, shared.settings([run]), must_exist=False)
    right: Right = {}

    def done(dry_run: bool) -> Cleaned:
        used = lambda: is_supervised(view.run.url, os.environ)  # noqa: E731
        try:
            with working("reading") as work:
                return clean(view, everything=everything, dry_run=dry_run, used=used, work=work, right=right)
        except KeyboardInterrupt:
            if not dry_run:
                trouble("some of it may be removed: the same command removes the rest")
            raise

    found = done(dry_run=dry_run or not yes)
    if not shared.as_json:
        if not is_quiet():
            _show(found, guards=_has_guards_saves(view))
        say_errors(found.reasons)
    if not (yes or dry_run):
        if not click.confirm("Remove it, also what exists nowhere else?" if found.only else "Remove it?", err=True):
            trouble("nothing was removed")
            return
        said, found = found.reasons, done(dry_run=False)
        say_errors(reason for reason in found.reasons if reason not in said)
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


def _has_guards_saves(view: RunView) -> bool:
    """Whether saves are in place that only their records finish."""
    from ckptguard.layouts.table import LAYOUTS

    with contextlib.suppress(CkptguardError):  # the run may be gone, and its records elsewhere
        return any(LAYOUTS[checkpoint.layout].sealed_by_writer for checkpoint in view.checkpoints)
    return False


def _show(found: Cleaned, *, guards: bool) -> None:
    """Say what goes and what stays; `guards`: saves of a guard are in place, which need their records."""
    rows = [(_WORDS[k.kind], k.files, size(k.bytes), "is removed") for k in found.removed]
    rows += [(_WORDS[k.kind], k.files, size(k.bytes), "stays") for k in found.stays]
    table(("what", "files", "size", "decision"), rows, right=("files", "size"))
    if found.stays:
        say("what exists nowhere else stays: `ckptguard restore` copies it out, and --everything removes it")
    if guards and any(k.kind == "records" for k in found.removed):
        say("without records, saves of a TrainingGuard count as incomplete, until `ckptguard reseal` says otherwise")
    if found.only:
        count, of = sum(k.files for k in found.only), size(sum(k.bytes for k in found.only))
        say(f"{count} of these files exist nowhere else ({of}): without --everything they stay")
