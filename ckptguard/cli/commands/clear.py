"""``ckptguard clear``, ``reseal`` and ``accept``: what only a user can know of a checkpoint."""

from __future__ import annotations

import click

from ckptguard.cli.command import Command, Place, Shared, shared_options
from ckptguard.cli.exit_codes import ExitCode, of_outcomes
from ckptguard.cli.output import bytes_below, emit, say, working
from ckptguard.cli.render import print_checked

CODES = (ExitCode.BAD, ExitCode.NOT_FOUND)
_VERIFYING = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND, ExitCode.BUSY)


@click.command("clear", cls=Command, codes=CODES, short_help="Lift a suspicion, with a reason.")
@click.argument("run", type=Place())
@click.argument("checkpoint")
@click.option("--reason", required=True, metavar="TEXT", help="Why it is trusted again; it is recorded.")
@shared_options
def command(run: str, checkpoint: str, reason: str, shared: Shared) -> None:
    """Lift SUSPECT from one CHECKPOINT of RUN (its path, id or step), with a recorded reason.

    Damage cannot be cleared.
    """
    from ckptguard.runs.run_view import open_view
    from ckptguard.values.ids import escape
    from ckptguard.verification.user_decisions import clear

    if not reason.strip():
        raise click.BadParameter("it is empty", param_hint="--reason")
    view = open_view(run, shared.settings())
    verdict = clear(view, checkpoint, reason=reason)
    if shared.as_json:
        emit("clear", verdict, "cleared", target=view.run.url)
    else:
        say(f"{verdict.id} of {escape(verdict.series)} is {verdict.outcome.value}")


@click.command("reseal", cls=Command, codes=_VERIFYING, short_help="Say that a changed checkpoint was saved anew.")
@click.argument("ckpt", type=Place())
@shared_options
def reseal_command(ckpt: str, shared: Shared) -> None:
    """Take the bytes of CKPT as a new save, although they look like damage, and verify them as at first sight.

    Its digests are taken as they are now: only say so if you know that it was saved again on purpose.
    """
    from ckptguard.errors import NotFoundError
    from ckptguard.runs.target import resolve_target
    from ckptguard.verification.user_decisions import reseal

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


@click.command("accept", cls=Command, codes=_VERIFYING, short_help="Accept a deliberate change of the schema.")
@click.argument("run", type=Place())
@click.argument("checkpoint", required=False)
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="The checkpoint, by its step.")
@shared_options
def accept_command(run: str, checkpoint: str | None, step: int | None, shared: Shared) -> None:
    """Take the tensors, shapes and dtypes of one CHECKPOINT of RUN (its path, id or step) as the reference from now on.

    It is verified again.
    """
    from ckptguard.runs.run_view import open_view
    from ckptguard.verification.user_decisions import accept

    if (checkpoint is None) == (step is None):
        raise click.UsageError("name one checkpoint: by its path or id, or by --step")
    view = open_view(run, shared.settings())
    with working("verifying") as work:
        checked = accept(view, str(step) if checkpoint is None else checkpoint, work=work)
    if shared.as_json:
        emit("accept", target=view.run.url, checkpoint=checked)
    else:
        print_checked(checked)
    raise click.exceptions.Exit(of_outcomes([checked.outcome]))
