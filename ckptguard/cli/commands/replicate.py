"""``ckptguard replicate``: have the good checkpoints also lie elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import RATE, PathOrUrl, Shared, command
from ckptguard.cli.render import say_lines, table
from ckptguard.terminal.output import emit, escape, is_quiet, trouble, working
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.replicas.replicate import Replica

CODES = (ExitCode.BAD, ExitCode.NOT_FOUND, ExitCode.BUSY)


@command("replicate", "Copy good checkpoints to other places.", CODES, common="quiet json config records")
@click.argument("run", type=PathOrUrl())
@click.option(
    "--to",
    "urls",
    multiple=True,
    type=PathOrUrl(),
    metavar="URL",
    help="Send to this place, not to the replicas in the settings.",
)
@click.option("--rate", type=RATE, help="Send at most this many bytes a second: 100MB, 50MiB.")
@click.option("--dry-run", is_flag=True, help="Say what would be sent, and send nothing.")
def replicate(run: str, urls: tuple[str, ...], rate: float | None, dry_run: bool, shared: Shared) -> None:
    """Send RUN's good checkpoints to its replicas, the newest first, and read each one back from there.

    A replica is a run of its own: verify, known-good and restore work on it without the original. What is there
    already is not sent again, and what was cut short goes on. Nothing is removed there, unless the settings give the
    place a rule: `ckptguard prune REPLICA` does that.
    """
    from ckptguard.replicas.replicate import replica_urls
    from ckptguard.runs.target import open_named_run
    from ckptguard.upkeep.tiers import update_replica

    settings = shared.settings([run], replicas=urls, replica_rate=rate)
    view = open_named_run(run, settings)
    places = replica_urls(view.run.url, settings)
    if not places:
        raise click.UsageError("there is no place to replicate to: give --to, or `replicas` in the settings")
    with working("replicating", rate=settings.replica_rate) as work:
        done = [update_replica(view, url, dry_run=dry_run, work=work) for url in places]
    if shared.as_json:
        emit("replicate", target=view.run.url, dry_run=dry_run, replicas=done)
    else:
        _show(done)
    for replica in done:
        if replica.trouble is not None:
            trouble(f"error: {escape(replica.url)}: {escape(replica.trouble)}")
    raise click.exceptions.Exit(_code(done))


def _code(done: Sequence[Replica]) -> ExitCode:
    words = {checkpoint.done for replica in done for checkpoint in replica.checkpoints}
    if "damaged" in words:
        return ExitCode.BAD
    if "failed" in words or any(replica.trouble is not None for replica in done):
        return ExitCode.FAILED
    return ExitCode.BUSY if "raced" in words else ExitCode.GOOD


def _show(done: Sequence[Replica]) -> None:
    from ckptguard.documents.done_lines import replica_line, replica_pruned_lines, replica_table

    for replica in done:
        if is_quiet() and not replica.behind and replica.trouble is None:
            continue
        say_lines([replica_line(replica)])
        if replica.checkpoints:
            table(*replica_table(replica))
        if replica.pruned is not None and not is_quiet():
            say_lines(replica_pruned_lines(replica.pruned))
