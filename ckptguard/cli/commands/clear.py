"""``ckptguard clear``, ``reseal`` and ``accept``: what only a user can know of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, Shared, command
from ckptguard.cli.commands.pin import checkpoint_of_run
from ckptguard.cli.render import print_checked
from ckptguard.terminal.output import bytes_below, emit, is_quiet, say_well, working
from ckptguard.values.exit_codes import ExitCode, of_outcomes

if TYPE_CHECKING:
    from ckptguard.records.run import Run
    from ckptguard.runs.results import Checked

CODES = (ExitCode.BAD, ExitCode.NOT_FOUND)
_VERIFYING = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.NOT_FOUND, ExitCode.BUSY)


@command("clear", "Mark a suspect checkpoint as good.", CODES, common="quiet json config records")
@click.argument("run", type=PathOrUrl())
@click.argument("checkpoint")
@click.option("--reason", required=True, metavar="TEXT", help="Say why it is trusted again.")
def clear(run: str, checkpoint: str, reason: str, shared: Shared) -> None:
    """Mark one suspect CHECKPOINT of RUN (its path, id or step) as good, and say why. The reason is recorded.

    Damage cannot be cleared: `ckptguard repair` and `ckptguard rollback` are for that.
    """
    from ckptguard.reporting.open_and_close import close_incidents_about
    from ckptguard.runs.run_view import open_view
    from ckptguard.values.ids import escape
    from ckptguard.verification.user_decisions import clear

    if not reason.strip():
        raise click.BadParameter("it is empty", param_hint="--reason")
    view = open_view(run, shared.settings([run]))
    verdict = clear(view, checkpoint, reason=reason)
    close_incidents_about(view.run, id=verdict.id, action=f"cleared: {reason}")
    if shared.as_json:
        emit("clear", verdict, "cleared", target=view.run.url)
    else:
        say_well(f"{escape(checkpoint)} is {verdict.outcome.value}")


@command("reseal", "Mark a changed checkpoint as a new save.", _VERIFYING, common="quiet json config records")
@click.argument("ckpt", type=PathOrUrl())
def reseal(ckpt: str, shared: Shared) -> None:
    """Mark CKPT as a new save, although its new bytes look like damage. It is verified as a new save.

    Its digests are recorded as they are now, so damage would be taken for right. Be sure that it was saved again.

    It also takes a save of TrainingGuard whose records are lost, because only these say that it was finished.
    """
    from ckptguard.verification.user_decisions import reseal

    view, checkpoint = checkpoint_of_run(ckpt, shared.settings([ckpt]))
    with working("verifying", bytes_below(ckpt)) as work:
        checked = reseal(view, checkpoint.path, work=work)
    raise click.exceptions.Exit(_tell("reseal", view.run, checked, shared, did="it was saved again on purpose"))


@command("accept", "Use these tensors as the new reference.", _VERIFYING, common="quiet json config records")
@click.argument("run", type=PathOrUrl())
@click.argument("checkpoint", required=False)
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Name the checkpoint by its step.")
def accept(run: str, checkpoint: str | None, step: int | None, shared: Shared) -> None:
    """Use the tensors, shapes and dtypes of one CHECKPOINT of RUN (its path, id or step) as the new reference.

    They are the reference from now on, and the checkpoint is verified again.
    """
    from ckptguard.runs.run_view import open_view
    from ckptguard.verification.user_decisions import accept

    if (checkpoint is None) == (step is None):
        raise click.UsageError("name one checkpoint: by its path or id, or by --step")
    view = open_view(run, shared.settings([run]))
    with working("verifying") as work:
        checked = accept(view, str(step) if checkpoint is None else checkpoint, work=work)
    raise click.exceptions.Exit(_tell("accept", view.run, checked, shared, did="its tensors were accepted"))


def _tell(command: str, run: Run, checked: Checked, shared: Shared, *, did: str) -> ExitCode:
    """Print the new verdict of a checkpoint. Return the exit code."""
    from ckptguard.reporting.open_and_close import close_incidents_about

    is_good = checked.outcome.value == "good"
    if is_good:
        close_incidents_about(run, [checked.path], action=did)
    if shared.as_json:
        emit(command, target=run.url, checkpoint=checked)
    elif not (is_quiet() and is_good):
        print_checked(checked)
    return of_outcomes([checked.outcome])
