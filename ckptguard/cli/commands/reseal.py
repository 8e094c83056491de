"""``ckptguard reseal``: the user's word that a checkpoint was saved anew."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, json_option, settings_from, settings_options
from ckptguard.cli.exit_codes import ExitCode, of_outcomes
from ckptguard.cli.output import emit
from ckptguard.cli.progress import bytes_below, progress_bar

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND, ExitCode.BUSY)


@click.command("reseal", cls=Command, codes=CODES, short_help="Say that a changed checkpoint was saved anew.")
@click.argument("ckpt", type=Place())
@json_option
@settings_options
def command(ckpt: str, as_json: bool, config: str | None, records: str | None) -> None:
    """Take the bytes of CKPT as a new save, although they look like damage, and verify them as at first sight.

    Its digests are taken as they are now: only say so if you know that it was saved again on purpose.
    """
    from ckptguard.cli.render import print_checked
    from ckptguard.documents.build import document
    from ckptguard.errors import NotFoundError
    from ckptguard.runs.target import resolve_target
    from ckptguard.runs.work import Work
    from ckptguard.verify.user_decisions import reseal

    target = resolve_target(ckpt, settings_from(config, records))
    if target.view is None or target.checkpoint is None:
        raise NotFoundError(f"{ckpt} is no checkpoint of a run with records", hint="name the checkpoint's own path")
    with progress_bar("verifying", bytes_below(ckpt)) as advance:
        checked = reseal(target.view, target.checkpoint.path, work=Work(progress=advance))
    if as_json:
        emit(document("reseal", target=target.view.run.url, checkpoint=checked))
    else:
        print_checked(checked)
    raise click.exceptions.Exit(of_outcomes([checked.outcome]))
