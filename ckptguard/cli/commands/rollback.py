"""``ckptguard rollback``: make the known-good checkpoint the newest one that a trainer can find."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say, trouble
from ckptguard.cli.render import cell

CODES = (ExitCode.BAD, ExitCode.NOT_FOUND, ExitCode.BUSY, ExitCode.EXHAUSTED, ExitCode.NO_KNOWN_GOOD)


@click.command("rollback", cls=Command, short_help="Make the known-good one the newest.", codes=CODES)
@click.argument("run", type=Place())
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--force", is_flag=True, help="Even while files of the run are being written.")
@click.option("--to", "to", metavar="CKPT", help="Go back to this one: a path in RUN, or an id.")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Go back to the known-good one of this step.")
@shared_options
def command(run: str, dry_run: bool, force: bool, to: str | None, step: int | None, shared: Shared) -> None:
    """Move what is newer than RUN's known-good checkpoint to quarantine, and put the known-good one back in its place.

    Names that a trainer resumes from (last.pt, latest, links) then hold the good one too. If one of them cannot,
    nothing is moved. Refused while RUN is being written.
    """
    from ckptguard.recover.roll_back import GoBack, known_good_of, roll_back
    from ckptguard.runs.run_view import open_view

    if to is not None and step is not None:
        raise click.UsageError("give --to or --step, not both")
    view = open_view(run, shared.settings())
    id = None if to is None and step is None else known_good_of(view, to, step)
    back = GoBack(reason="rolled back from the command line", to_id=id, dry_run=dry_run, force=force)
    done = roll_back(view, back)
    if shared.as_json:
        emit("rollback", done, target=view.run.url)
        return
    for path in done.unverified if dry_run else ():
        say(f"would first verify {cell(path)}, and go back to it if it is good; else:")
    would = "would go" if dry_run else "went"
    say(f"{would} back to {cell(done.known_good.path)} ({done.known_good.id})")
    for path in done.quarantined:
        say(f"{'would quarantine' if dry_run else 'quarantined'} {cell(path)}")
    if done.put_back:
        say(f"{'would put' if dry_run else 'put'} the kept copy back under its own name")
    for given in done.given:
        what = "its own content" if given.source == given.path else cell(given.source)
        say(f"{'would give' if dry_run else 'gave'} {cell(given.path)} {what} ({given.id})")
    for pointer in done.pointed:
        say(f"{'would have' if dry_run else 'had'} {cell(pointer.key)} name {cell(pointer.path)}")
    for path in done.left_bad:
        trouble(
            f"{cell(path)} is bad and stays, for it is of another training: --to goes back to a checkpoint of that one"
        )
