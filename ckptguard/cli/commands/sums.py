"""``ckptguard sums``: the MD5 of every file, as input of ``md5sum -c``."""

from __future__ import annotations

import sys

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.terminal.output import bytes_below, emit, escape, say, warn, working
from ckptguard.values.exit_codes import ExitCode

CODES = (ExitCode.BAD, ExitCode.NOT_FOUND)


@command("sums", "Print a checkpoint's MD5 sums for `md5sum -c`.", CODES)
@click.argument("ckpt", type=PathOrUrl())
def sums(ckpt: str, shared: Shared) -> None:
    """Print the MD5 of each file of CKPT, as `md5sum -c` reads it.

    Of a checkpoint that was verified in its run, these are the sums on record, whatever its files hold now. A sum that
    is not on record is computed, if the file still holds what was verified. Of any other checkpoint all are computed.

    Paths are relative to the checkpoint, or to the folder of one that is a single file:

    \b
        cd runs/exp1/checkpoint-500 && ckptguard sums . | md5sum -c
        cd runs/exp1 && ckptguard sums net-500.pt | md5sum -c
    """
    from ckptguard.inspect.sums import check_line, sums

    settings = shared.settings([ckpt])
    with working("reading", bytes_below(ckpt)) as work:
        found = sums(ckpt, settings, work=work)
    warn(*(f"{name} is no regular file and has no sum" for name in found.left_out))
    if shared.as_json:
        emit("sums", found)
        return
    for file in found.files:
        line = check_line(file.md5, file.path)
        # md5sum needs names as they are; a terminal does not.
        say(escape(line) if sys.stdout.isatty() else line)
