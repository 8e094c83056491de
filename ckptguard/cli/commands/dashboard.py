"""``ckptguard dashboard``: see runs in the browser."""

from __future__ import annotations

import os
import sys

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.values.exit_codes import ExitCode


@command("dashboard", "See runs in the browser.", (ExitCode.NOT_FOUND, ExitCode.BUSY), common="config records")
@click.argument("runs", type=PathOrUrl(), nargs=-1, metavar="[RUN...]")
@click.option("--fleet", metavar="FLEET", help="Show the runs in a folder, at a URL, or of a fleet file.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, metavar="PORT", help="Use this port, not any free one."
)
@click.option("--read-only", is_flag=True, help="Let the page change nothing: the link has the role reader.")
def dashboard(runs: tuple[str, ...], fleet: str | None, port: int, read_only: bool, shared: Shared) -> None:
    """Show runs in the browser: their checkpoints, verdicts, curves and incidents, live.

    It prints a link that logs in once, within 10 minutes, and works until you press Ctrl-C. Only this machine can
    reach the page. From elsewhere let SSH carry the port.

    It is a daemon: a run that no daemon guards is guarded meanwhile, and new checkpoints are verified. A run that
    another daemon guards is only looked at. For a page that stays, start `ckptguard-daemon --http`.
    """
    if not runs and fleet is None:
        raise click.UsageError("name at least one RUN, or a fleet with --fleet")
    words = ["--http", f"127.0.0.1:{port}", "--link", "reader" if read_only else "operator", "--if-unguarded"]
    given = {"--fleet": fleet, "--config": shared.config}
    if shared.records is not None:
        os.environ["CKPTGUARD_RECORDS"] = shared.records
    words += [word for option, value in given.items() if value is not None for word in (option, value)]
    # Without -P, Python would import what lies in the current folder: a downloaded run.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "ckptguard_daemon", *words, "--", *runs])
