"""``ckptguard silence``: for some time nobody is disturbed about a run."""

from __future__ import annotations

import getpass
import os

import click

from ckptguard.cli.command import Parsed, PathOrUrl, Shared, ShortText, command
from ckptguard.cli.render import cell
from ckptguard.terminal.output import emit, say_well
from ckptguard.values.exit_codes import ExitCode


@command(
    "silence", "Send no messages about a run for a time.", (ExitCode.NOT_FOUND,), common="quiet json config records"
)
@click.argument("run", type=PathOrUrl())
@click.option(
    "--until",
    type=Parsed("when", "ckptguard.records.silences:silence_end"),
    help="Silence it until a date, a time (2027-01-31T12:00) or for a span (8h). 30d at most.",
)
@click.option("--reason", type=ShortText(), default="", help="Say why. `status` and the dashboard show it.")
@click.option("--end", is_flag=True, help="End the silence now.")
def silence(run: str, until: float | None, reason: str, end: bool, shared: Shared) -> None:
    """Send no message and raise no alert about RUN until a time. All else goes on: verdicts, incidents and copies.

    Then it is as before. What happened meanwhile is on record, and no message about it is sent later.
    """
    from ckptguard.documents.done_lines import silence_text
    from ckptguard.records.silences import end_silence, silence_run
    from ckptguard.runs.target import open_named_run

    if end == (until is not None):
        raise click.UsageError("give either --until or --end")
    named = open_named_run(run, shared.settings([run])).run
    silence = None
    if until is None:
        end_silence(named)
    else:
        silence = silence_run(named, until, reason=reason, by=_user())
    if shared.as_json:
        emit("silence", target=named.url, silence=silence)
    elif silence is None:
        say_well(f"{cell(named.url)} is not silenced any more")
    else:
        say_well(f"silenced {cell(named.url)} {silence_text(silence)}")


def _user() -> str:
    from ckptguard.records.who_and_when import this_host

    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container may have no names
        name = str(os.getuid())
    return f"{name}@{this_host()[0]}"
