"""``ckptguard supervise``: run a training command; when its saves turn sick or it dies, go back and start it again."""

from __future__ import annotations

import os
import sys

import click

from ckptguard.cli.command import PathOrUrl, RunsAnother, Shared, command
from ckptguard.terminal.output import trouble
from ckptguard.values.exit_codes import ExitCode

CODES = (ExitCode.BAD, ExitCode.UNDECIDED, ExitCode.BUSY, ExitCode.EXHAUSTED, ExitCode.NO_KNOWN_GOOD)


def _no_nan(ctx: click.Context, param: click.Parameter, value: float) -> float:
    if value != value:
        raise click.BadParameter("it is not a number", ctx, param)
    return value


@command(
    "supervise", "Run a training; go back when its saves turn sick.", CODES, common="config records", cls=RunsAnother
)
@click.argument("run", type=PathOrUrl())
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option(
    "--max-rollbacks",
    type=click.IntRange(0, 1000),
    default=3,
    show_default=True,
    metavar="N",
    help="Start COMMAND again at most N times.",
)
@click.option(
    "--stop-seconds",
    type=click.FloatRange(0.0, 86400.0),
    callback=_no_nan,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Give COMMAND this long to end when it is asked to.",
)
@click.option(
    "--nodes-seconds",
    type=click.FloatRange(0.0, 86400.0),
    callback=_no_nan,
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Under srun or torchrun, wait this long for the supervise of each other node.",
)
@click.option("--alone", is_flag=True, help="Under srun or torchrun, know nothing of other nodes.")
@click.option("--strict", is_flag=True, help="End with 4 if files that may be training state were not verified.")
def supervise(
    run: str,
    argv: tuple[str, ...],
    max_rollbacks: int,
    stop_seconds: float,
    nodes_seconds: float,
    alone: bool,
    strict: bool,
    shared: Shared,
) -> None:
    """Run COMMAND, which saves into RUN, and verify what it saves. Go back when a save is sick or COMMAND dies.

    A save is sick if weights or optimizer state are NaN, or if the Trainer's own log has a gradient norm that is not
    finite. COMMAND is then stopped, with all that it started. What is newer than the known-good checkpoint goes to
    quarantine, and COMMAND is started again. Of damaged and incomplete saves you are notified, and COMMAND runs on.

    Under srun or torchrun, with one supervise for each task and a shared RUN, one of them leads: all COMMANDs stop and
    start together, and it goes back once for all.

    COMMAND has stdin, stdout and stderr for its own. The exit code is its own too (128 + n after signal n), unless one
    of those below applies.
    """
    from ckptguard.supervise.wait_for_command import HeldSignals

    def say(sentence: str) -> None:
        trouble(f"ckptguard: {sentence}")

    with HeldSignals() as signals:  # before anything below starts threads, and to the very end
        from ckptguard.supervise.nodes import Nodes, group_of
        from ckptguard.supervise.supervise import supervise

        settings = shared.settings([run])
        group = None if alone else group_of(os.environ)
        done = supervise(
            run,
            argv,
            settings,
            signals,
            max_rollbacks=max_rollbacks,
            stop_seconds=stop_seconds,
            tell=say,
            nodes=None if group is None else Nodes(run, settings, group, seconds=nodes_seconds),
        )
        code = done.code
        if done.error is not None:
            say(f"error: {done.error.message}")
            if done.error.hint:
                say(f"hint: {done.error.hint}")
        elif strict and done.not_understood and not code:
            code = ExitCode.UNDECIDED
        if done.last_line is not None:
            say(done.last_line)
        sys.stderr.flush()
        os._exit(code)  # not sys.exit: a look at storage that hangs must not hold up the end
