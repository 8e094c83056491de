"""The group of commands: each is imported when it is asked for, and every error ends in one sentence and a code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

from ckptguard.cli.failures import report_failure, trouble_of_machine
from ckptguard.terminal.output import discard_stdout, escape, prepare_streams
from ckptguard.values.exit_codes import ExitCode
from ckptguard.version import __version__

# The commands by what people want to do, in the order in which they need them. Help and documentation follow it.
GROUPS: dict[str, tuple[str, ...]] = {
    "Check your checkpoints": ("verify", "scrub", "show", "diff", "bisect", "sums"),
    "See how a run stands": ("status", "list", "incidents", "incident", "dashboard"),
    "Go back": ("known-good", "rollback", "restore", "gate", "supervise"),
    "Keep copies, and choose what stays": ("replicate", "repair", "prune", "pin", "unpin", "clean", "forget"),
    "Look after many runs": ("fleet",),
    "Decide what ckptguard cannot know": ("clear", "reseal", "accept"),
    "Set up": ("doctor", "config", "migrate", "notify", "silence", "token", "completion"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
# Each is the function of its name in the module of its name, but for these.
_MODULES = {"list": "list_checkpoints", "incident": "incidents", "unpin": "pin", "reseal": "clear", "accept": "clear"}
_FUNCTIONS = {"list": "list_checkpoints"}


class Commands(click.Group):
    """Loads commands on demand and turns every exception into a sentence on stderr and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name; its module is imported now."""
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"ckptguard.cli.commands.{_MODULES.get(name, name)}")
        command = getattr(module, _FUNCTIONS.get(name, name))
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click's own, with a suggestion for a mistyped name."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            import difflib  # only for who mistyped

            close = difflib.get_close_matches(name, COMMANDS, n=1)
            meant = f": did you mean {close[0]}?" if close else ""
            ctx.fail(f"there is no command {escape(name)}{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group of commands under its title, all of them in the same columns."""
        first = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            rows = [(name.ljust(first), self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(100)) for name, command in rows if command])

    def main(self, args: Sequence[str] | None = None, *further: Any, **options: Any) -> Any:
        """Run a command and exit with its code. With --json an error is a document on stdout too."""
        words = list(sys.argv[1:] if args is None else args)
        prepare_streams()
        try:
            if any("://" in word for word in words):
                from ckptguard.cli.waiting import report_waits  # only a store lets people wait

                report_waits(words)
            code = super().main(words, *further, **{**options, "standalone_mode": False})
        except BrokenPipeError:
            discard_stdout()
            code = ExitCode.FAILED
        except (Exception, KeyboardInterrupt) as error:
            code = report_failure(error, words, COMMANDS)
        sys.exit(code or ExitCode.GOOD)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. What the system refuses becomes an error of ours."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise trouble_of_machine(error) or error from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, package_name="ckptguard", message="%(prog)s %(version)s")
def commands() -> None:
    """Verify training checkpoints, find the last known-good one, and go back to it.

    RUN is the folder or URL into which a training saves. CKPT is one checkpoint: a file or a folder. TARGET may be any
    of these. `ckptguard COMMAND --help` says more about a command.
    """
