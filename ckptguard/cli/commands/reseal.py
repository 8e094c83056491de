"""``ckptguard reseal``: the user's word that a checkpoint was saved anew."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode, of_outcomes
from ckptguard.cli.output import emit
from ckptguard.cli.progress import bytes_below, working

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND, ExitCode.BUSY)


@click.command("reseal", cls=Command, codes=CODES, short_help="Say that a changed checkpoint was saved anew.")
@click.argument("ckpt", type=Place())
@shared_options
def command(ckpt: str, shared: Shared) -> None:
    """Take the bytes of CKPT as a new save, although they look like damage, and verify them as at first sight.

    Its digests are taken as they are now: only say so if you know that it was saved again on purpose.
    """
    from ckptguard.cli.render import print_checked
    from ckptguard.errors import NotFoundError
    from ckptguard.runs.target import resolve_target
    from ckptguard.verify.reseal import reseal

    target = resolve_target(ckpt, shared.settings())
    if target.view is None or target.checkpoint is None:
        raise NotFoundError(f"{ckpt} is no checkpoint of a run with records", hint="name the checkpoint's own path")
    with working("verifying", bytes_below(ckpt)) as work:
        checked = reseal(target.view, target.checkpoint.path, work=work)
    if shared.as_json:
        emit("reseal", target=target.view.run.url, checkpoint=checked)
    else:
        print_checked(checked)
    raise click.exceptions.Exit(of_outcomes([checked.outcome]))
