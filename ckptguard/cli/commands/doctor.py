"""``ckptguard doctor``: what does this storage really do?"""

from __future__ import annotations

import threading

import click

from ckptguard.cli.command import Command, Place, Shared, config_option, json_option
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, escape, say

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND)


@click.command("doctor", cls=Command, codes=CODES, short_help="Can this storage hold checkpoints?")
@click.argument("url", type=Place())
@json_option
@config_option
def command(url: str, as_json: bool, config: str | None) -> None:
    """Probe, in under 10 seconds, what the storage at URL does and does not, and say what follows.

    The probes write a few small objects beside the run's files, and remove them.
    """
    from ckptguard.inspect.doctor import diagnose, words

    threading.excepthook = lambda failed: None  # a watching thread that fails is an answer that does not come
    found = diagnose(url, Shared(config=config).settings().storage)
    if as_json:
        emit("doctor", found)
    else:
        say(words(found))
        for probe in found.probes:
            say(f"  {probe.name:<20} {probe.answer:<8} {escape(probe.means)}")
    codes = {"bad": ExitCode.BAD, "unknown": ExitCode.FAILED, "limited": ExitCode.UNDECIDED}
    raise click.exceptions.Exit(codes.get(found.outcome, ExitCode.GOOD))
