"""The group of commands: each is imported when it is asked for, and every error ends in one sentence and a code."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from ckptguard.cli.exit_codes import ExitCode, of_error
from ckptguard.cli.output import discard_stdout, prepare_streams, report_error, trouble
from ckptguard.errors import CkptguardError
from ckptguard.version import __version__

# In the order in which people need them.
COMMANDS = (
    *("verify", "status", "list", "show", "diff", "bisect", "incidents", "incident", "sums", "known-good", "restore"),
    *("replicate", "rollback", "supervise", "scrub", "repair", "prune", "pin", "unpin", "clear", "reseal", "accept"),
    *("doctor", "notify", "completion"),
)
# Those that are not `command` in the module of their name.
_ELSEWHERE = {
    "list": "list_checkpoints:command",
    "incident": "incidents:incident_command",
    "unpin": "pin:unpin_command",
    "reseal": "clear:reseal_command",
    "accept": "clear:accept_command",
}


class Commands(click.Group):
    """Loads commands on demand and turns every exception into a sentence on stderr and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name; its module is imported now."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = _ELSEWHERE.get(cmd_name, f"{cmd_name.replace('-', '_')}:command").partition(":")
        command = getattr(importlib.import_module(f"ckptguard.cli.commands.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Click's own, which prints help and version before any command is invoked."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            discard_stdout()
            trouble(f"error: the output cannot be written: {error.strerror}")
            sys.exit(ExitCode.FAILED)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Nothing but click's own exits comes out."""
        prepare_streams()
        try:
            return super().invoke(ctx)
        except CkptguardError as error:
            debug_traceback()
            report_error(error)
            ctx.exit(of_error(error))
        except (KeyboardInterrupt, click.Abort):
            trouble("interrupted")
            ctx.exit(ExitCode.INTERRUPTED)
        except BrokenPipeError:
            discard_stdout()
            ctx.exit(ExitCode.FAILED)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except Exception as error:
            debug_traceback()
            told = _machine_trouble(error)
            if told is not None:
                report_error(told)
                ctx.exit(ExitCode.FAILED)
            trouble(f"error: unexpected {type(error).__name__}: {error}")
            trouble("hint: this is a mistake in ckptguard; please report it with the output of CKPTGUARD_DEBUG=1")
            ctx.exit(ExitCode.FAILED)


def _machine_trouble(error: Exception) -> CkptguardError | None:
    try:
        from ckptguard.storage.failures import machine_trouble
    except (MemoryError, OSError, ImportError):
        return CkptguardError("this machine lacks what it takes to start")
    return machine_trouble(error)


def debug_traceback() -> None:
    """Show where an error came from, to those who asked for it."""
    if os.environ.get("CKPTGUARD_DEBUG") == "1":
        import traceback

        traceback.print_exc(file=sys.stderr)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, package_name="ckptguard", message="%(prog)s %(version)s")
def commands() -> None:
    """Verify training checkpoints, find the last known-good one, and go back to it.

    RUN is the folder or URL under which a training run saves; TARGET may also be one checkpoint or one file.
    """
