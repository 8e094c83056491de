"""``ckptguard rollback``: make the known-good checkpoint the newest one that a trainer can find."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import Command, Place, Shared, quiet_option, shared_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, is_quiet, say, trouble
from ckptguard.cli.render import cell

if TYPE_CHECKING:
    from ckptguard.recover.roll_back import RolledBack

CODES = (ExitCode.BAD, ExitCode.NOT_FOUND, ExitCode.BUSY, ExitCode.EXHAUSTED, ExitCode.NO_KNOWN_GOOD)


@click.command("rollback", cls=Command, short_help="Make the known-good checkpoint the newest.", codes=CODES)
@click.argument("run", type=Place())
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--force", is_flag=True, help="Go back even while files of the run are being written.")
@click.option("--to", "to", metavar="CKPT", help="Go back to this checkpoint: a path in RUN, or an id.")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Go back to the known-good checkpoint of step N.")
@quiet_option
@shared_options
def command(run: str, dry_run: bool, force: bool, to: str | None, step: int | None, shared: Shared) -> None:
    """Make RUN's known-good checkpoint the newest one that a trainer can find. What is newer is moved to quarantine.

    Names that a trainer resumes from (last.pt, latest, links) hold the good one afterwards. If one of them cannot,
    nothing is moved. Nothing is moved either while RUN is being written.
    """
    from ckptguard.recover.roll_back import GoBack, known_good_of, roll_back
    from ckptguard.reporting.open_and_close import close_incidents_about
    from ckptguard.runs.run_view import open_view

    if to is not None and step is not None:
        raise click.UsageError("give --to or --step, not both")
    view = open_view(run, shared.settings())
    id = None if to is None and step is None else known_good_of(view, to, step)
    back = GoBack(reason="rolled back from the command line", to_id=id, dry_run=dry_run, force=force)
    done = roll_back(view, back)
    if not dry_run:
        good = str(done.known_good.id)
        close_incidents_about(view.run, done.quarantined, action=f"went back to {good}", known_good=good)
    if shared.as_json:
        emit("rollback", done, target=view.run.url)
    elif dry_run or not is_quiet():
        _show(done, dry_run)
    for path in done.left_bad:
        trouble(f"warning: {path} is bad and stays, for it is of another training: go back there with --to")


def _show(done: RolledBack, dry_run: bool) -> None:
    for path in done.unverified if dry_run else ():
        say(f"would first verify {cell(path)}, and go back to it if it is good; else:")
    would = "would go" if dry_run else "went"
    say(f"{would} back to {cell(done.known_good.path)}{done.known_good.id.nth_save}")
    for path in done.quarantined:
        say(f"{'would quarantine' if dry_run else 'quarantined'} {cell(path)}")
    if done.put_back:
        say(f"{'would put' if dry_run else 'put'} the kept copy back under its own name")
    for given in done.given:
        what = "its own content" if given.source == given.path else cell(given.source)
        say(f"{'would fill' if dry_run else 'filled'} {cell(given.path)} with {what}{given.id.nth_save}")
    for pointer in done.pointed:
        say(f"{'would point' if dry_run else 'pointed'} {cell(pointer.key)} at {cell(pointer.path)}")
    if done.repeats is not None:
        first, last = done.repeats
        noun = "epoch" if "epoch" in done.known_good.series else "step"
        steps = f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"
        say(f"training {'would make' if dry_run else 'makes'} {steps} again, with all of their batches")
