"""``ckptguard gate``: let a training start only from a checkpoint that is good now."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import click

from ckptguard.cli.command import PathOrUrl, RunsAnother, Shared, command
from ckptguard.errors import SettingsError
from ckptguard.terminal.output import emit, escape, is_quiet, say, trouble, working
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.engine.gate import Gated
    from ckptguard.records.starts import JobStart

CODES = (ExitCode.NOT_FOUND, ExitCode.BUSY, ExitCode.EXHAUSTED, ExitCode.NO_KNOWN_GOOD)


@command("gate", "Start a training from what is good now.", CODES, common="quiet json config records", cls=RunsAnother)
@click.argument("run", type=PathOrUrl())
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.option(
    "--attempts",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    metavar="N",
    help="Start at most N times from one checkpoint without a new good save, then from the one before.",
)
@click.option("--require", is_flag=True, help="Fail where nothing was saved yet, too.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
def gate(run: str, argv: tuple[str, ...], attempts: int, require: bool, dry_run: bool, shared: Shared) -> None:
    """Let a training start only from a good checkpoint of RUN, whose bytes are read first. Then become COMMAND.

    If the newest checkpoint is not good now, the next one is taken, or a replica's. What is newer is moved to
    quarantine, so that the training's own resume finds the good one. If everything is good, nothing is moved.

    Each call counts as a start. After N starts without a new good save, the checkpoint is passed over. Gates of several
    ranks that run at the same time count as one start, and agree. In a Slurm job only that job's own starts count.

    Without COMMAND, the path of the checkpoint is printed. Where nothing was saved yet, nothing is printed.
    """
    from ckptguard.engine.gate import gate
    from ckptguard.runs.target import open_named_run
    from ckptguard.scan import scanner_of
    from ckptguard.supervise.command import become

    if argv and (shared.as_json or dry_run):
        raise click.UsageError("--json and --dry-run are not for a COMMAND")
    if argv and shutil.which(argv[0]) is None:  # it must not count as a start
        raise SettingsError(f"there is no command {argv[0]}", hint="check its name, and that it can be executed")
    settings = shared.settings([run])
    must_exist = (require and not settings.replicas) or os.path.lexists(run)  # what is there must be a folder
    # A training must start, too, where somebody has verified the folder of its checkpoints.
    view = open_named_run(run, settings, must_exist=must_exist, may_hold_runs=True)
    with working("reading", scanner=scanner_of(settings)) as work:
        done = gate(view, attempts=attempts, require=require, dry_run=dry_run, job=_slurm_job(), work=work)
    if shared.as_json:
        emit("gate", done, target=view.run.url)
        return
    if not is_quiet():
        _tell(done, view.run.url)
    if argv:
        become(argv)
    if done.known_good is not None:
        say(escape(done.known_good.path))


def _slurm_job() -> JobStart | None:
    """The Slurm job that this process belongs to, or whose prolog it is."""
    from ckptguard.records.starts import JobStart
    from ckptguard.values.ids import whole_number

    number = os.environ.get("SLURM_JOB_ID", "")
    if not (number.isascii() and number.isdigit()):
        return None
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    requeue = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("SLURM_JOB_RESTART_COUNT") or "0"
    return JobStart(
        job=f"{cluster}/{number}" if cluster else number,
        requeue=whole_number(requeue) or 0,
        prolog=os.environ.get("SLURM_SCRIPT_CONTEXT", "").startswith("prolog"),
    )


def _tell(done: Gated, url: str) -> None:
    """What was decided, on stderr: stdout is COMMAND's, or the path's."""
    if done.known_good is None:
        trouble(f"nothing was saved into {url} yet: training starts from the beginning")
        return
    moved = done.rollback.quarantined if done.rollback is not None else ()
    is_plan = done.rollback is not None and done.rollback.dry_run
    for path in done.rollback.unverified if done.rollback is not None and is_plan else ():
        trouble(f"would first verify {path}, and start from it if it is good; else:")
    for path in done.spent:
        trouble(f"{path} had its {done.attempts} starts without a new good save")
    for path in moved:
        trouble(f"{'would quarantine' if is_plan else 'quarantined'} {path}")
    again = f" (start {done.attempt} of {done.attempts} without a new good save)" if done.attempt > 1 else ""
    trouble(f"training {'would start' if is_plan else 'starts'} from {done.known_good.path}{again}")
