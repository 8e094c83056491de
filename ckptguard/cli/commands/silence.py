"""``ckptguard silence``: for some time nobody is disturbed about a run."""

from __future__ import annotations

import getpass
import os

import click

from ckptguard.cli.command import Command, PathOrUrl, Shared, quiet_option, shared_options
from ckptguard.cli.render import cell
from ckptguard.terminal.output import emit, say_well
from ckptguard.values.exit_codes import ExitCode


@click.command(
    "silence", cls=Command, codes=(ExitCode.NOT_FOUND,), short_help="Send no messages about a run for a time."
)
@click.argument("run", type=PathOrUrl())
@click.option(
    "--until",
    metavar="WHEN",
    help="Silence it until a date, a time (2027-01-31T12:00) or for a span (8h). 30d at most.",
)
@click.option("--reason", default="", metavar="TEXT", help="Say why. `status` and the dashboard show it.")
@click.option("--end", is_flag=True, help="End the silence now.")
@quiet_option
@shared_options
def silence(run: str, until: str | None, reason: str, end: bool, shared: Shared) -> None:
    """Send no message and raise no alert about RUN until a time. All else goes on: verdicts, incidents and copies.

    Then it is as before. What happened meanwhile is on record, and no message about it is sent later.
    """
    from ckptguard.documents.done_lines import silence_text
    from ckptguard.errors import SettingsError
    from ckptguard.records.silences import LONGEST_TEXT, end_silence, silence_end, silence_run
    from ckptguard.runs.target import open_named_run

    if end == (until is not None):
        raise click.UsageError("give either --until or --end")
    if len(reason) > LONGEST_TEXT:
        raise click.BadParameter(f"it has more than {LONGEST_TEXT} characters", param_hint="--reason")
    try:
        ends = None if until is None else silence_end(until)
    except SettingsError as error:
        raise click.BadParameter(error.message, param_hint="--until") from error
    named = open_named_run(run, shared.settings([run])).run
    silence = None
    if ends is None:
        end_silence(named)
    else:
        silence = silence_run(named, ends, reason=reason, by=_user())
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
