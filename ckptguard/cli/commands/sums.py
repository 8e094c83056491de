"""``ckptguard sums``: the MD5 of every file, as input of ``md5sum -c``."""

from __future__ import annotations

import sys

import click

from ckptguard.cli.command import Command, Place, json_option, settings_from, settings_options
from ckptguard.cli.exit_codes import ExitCode
from ckptguard.cli.output import emit, say, trouble
from ckptguard.cli.progress import bytes_below, progress_bar

CODES = (ExitCode.BAD, ExitCode.NOT_FOUND)


@click.command("sums", cls=Command, codes=CODES, short_help="Print a checkpoint's MD5 sums for `md5sum -c`.")
@click.argument("ckpt", type=Place())
@json_option
@settings_options
def command(ckpt: str, as_json: bool, config: str | None, records: str | None) -> None:
    """Print the MD5 of each file of CKPT, as `md5sum -c` reads it.

    Of a checkpoint that was verified in its run these are the recorded sums, whatever its files hold now; those of a
    stray one are computed. Paths are relative to the checkpoint, or to the folder around one that is a single file:

    \b
        cd runs/exp1/checkpoint-500 && ckptguard sums . | md5sum -c
        cd runs/exp1 && ckptguard sums net-500.pt | md5sum -c
    """
    from ckptguard.documents.build import document, fields
    from ckptguard.inspect.sums import check_line, sums
    from ckptguard.runs.work import Work
    from ckptguard.values.ids import escape

    settings = settings_from(config, records)
    with progress_bar("reading", bytes_below(ckpt)) as advance:
        found = sums(ckpt, settings, work=Work(progress=advance))
    for name in found.left_out:
        trouble(f"warning: {name} is no regular file and has no sum")
    if as_json:
        emit(document("sums", **fields(found)))
        return
    for file in found.files:
        line = check_line(file.md5, file.path)
        # md5sum needs names as they are; a terminal does not.
        say(escape(line) if sys.stdout.isatty() else line)
