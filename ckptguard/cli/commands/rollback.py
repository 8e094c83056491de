"""``ckptguard rollback``: make the known-good checkpoint the newest one that a trainer can find."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.render import say_lines
from ckptguard.errors import NotFoundError
from ckptguard.terminal.output import emit, is_quiet, warn
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.runs.run_view import RunView

CODES = (ExitCode.BAD, ExitCode.NOT_FOUND, ExitCode.BUSY, ExitCode.EXHAUSTED, ExitCode.NO_KNOWN_GOOD)


@command("rollback", "Quarantine newer checkpoints and go back.", CODES, common="quiet json config records")
@click.argument("run", type=PathOrUrl())
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--force", is_flag=True, help="Go back even while files of the run are being written.")
@click.option("--to", "to", metavar="CKPT", help="Go back to this checkpoint: a path in RUN, or an id.")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Go back to the known-good checkpoint of step N.")
@click.option("--only", multiple=True, metavar="SERIES", help="Change nothing but this series: 'G_#.pth', 'A_*'.")
@click.option("--with", "joined", multiple=True, metavar="SERIES", help="This series is saved with the known-good one.")
@click.option("--undo-pointers", is_flag=True, help="Put back pointers and links that the last rollback rewrote.")
def rollback(
    run: str,
    dry_run: bool,
    force: bool,
    to: str | None,
    step: int | None,
    only: tuple[str, ...],
    joined: tuple[str, ...],
    undo_pointers: bool,
    shared: Shared,
) -> None:
    """Make RUN's known-good checkpoint the newest one that a trainer can find. What is newer is moved to quarantine.

    All files that are saved together go back to the same moment. Names that a trainer resumes from (last.pt, latest,
    links) hold the good one afterwards. If one of them cannot, nothing is moved. Nothing is moved either while RUN is
    being written, or where it is unknown what was saved together.
    """
    from ckptguard.documents.done_lines import rollback_lines
    from ckptguard.recover.roll_back import GoBack, known_good_of, roll_back
    from ckptguard.reporting.open_and_close import close_after_rollback
    from ckptguard.runs.run_view import open_view

    if to is not None and step is not None:
        raise click.UsageError("give --to or --step, not both")
    if undo_pointers and (dry_run or force or only or joined or to is not None or step is not None):
        raise click.UsageError("give --undo-pointers alone")
    view = open_view(run, shared.settings([run]))
    known = {checkpoint.series for checkpoint in view.checkpoints} | set(view.history.series)
    if only and joined:
        raise click.UsageError("say either --only or --with: the one leaves the rest alone, the other takes it along")
    meant = {name: _series_meant(name, known) for name in (*only, *joined)}
    for name, series in meant.items():
        if not series:
            raise NotFoundError(f"{view.run.url} has no series {name}", hint="`ckptguard list RUN --saves` names them")
    if undo_pointers:
        _undo_pointers(view, shared)
        return
    id = None if to is None and step is None else known_good_of(view, to, step)
    back = GoBack(
        reason="rolled back from the command line",
        to_id=id,
        only=frozenset(series for name in only for series in meant[name]) or None,
        joined=tuple(series for name in joined for series in meant[name]),
        dry_run=dry_run,
        force=force,
    )
    done = roll_back(view, back)
    reports = close_after_rollback(view.run, done)
    if shared.as_json:
        emit("rollback", done, target=view.run.url)
    elif dry_run or not is_quiet():
        say_lines(rollback_lines(done, reports))
    warn(
        *(f"{path} is bad and stays, for it is of another training: go back there with --to" for path in done.left_bad)
    )


def _series_meant(name: str, known: Collection[str]) -> list[str]:
    """Return the series of this name, else those that a pattern is for, as in ``[[saves]]``."""
    from ckptguard.values.patterns import Saves

    return [name] if name in known else sorted(series for series in known if Saves.has((name,), series))


def _undo_pointers(view: RunView, shared: Shared) -> None:
    from ckptguard.documents.done_lines import undone_lines
    from ckptguard.recover.roll_back import undo_pointers

    undone = undo_pointers(view)
    if shared.as_json:
        emit("rollback", undone, target=view.run.url)
    elif not is_quiet():
        say_lines(undone_lines(undone))
    warn(*(f"{key} was changed after the rollback and stays as it is" for key in undone.left))
