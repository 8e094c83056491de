"""``ckptguard doctor``: what does this storage really do?"""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, json_option, settings_from
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, escape, say

_CODES = {"bad": ExitCode.BAD, "unknown": ExitCode.FAILED, "limited": ExitCode.UNDECIDED}


@click.command(
    "doctor",
    cls=Command,
    short_help="Can this storage hold checkpoints?",
    codes=(ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND),
)
@click.argument("url", type=Place())
@json_option
@click.option(
    "--config", metavar="FILE", help="Settings (TOML) instead of ./ckptguard.toml.", type=click.Path(readable=False)
)
def command(url: str, as_json: bool, config: str | None) -> None:
    """Probe, in under 10 seconds, what the storage at URL does and does not, and say what follows.

    The probes write a few small objects beside the run's files, and remove them.
    """
    from ckptguard.documents.build import document, fields
    from ckptguard.inspect.doctor import diagnose, words

    found = diagnose(url, settings_from(config).storage)
    if as_json:
        emit(document("doctor", **fields(found)))
    else:
        say(words(found))
        for probe in found.probes:
            say(f"  {probe.name:<20} {probe.answer:<8} {escape(probe.means)}")
    if found.outcome != "good":
        raise click.exceptions.Exit(_CODES[found.outcome])
