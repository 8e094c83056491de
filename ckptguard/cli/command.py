"""What commands share: exit codes in their help, the options that make their settings, and kinds of arguments."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ckptguard.terminal.output import be_quiet, trouble
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.values.settings import Settings

_ALWAYS = (ExitCode.GOOD, ExitCode.FAILED, ExitCode.USAGE, ExitCode.INTERRUPTED)
_RATE = re.compile(r"(?P<amount>\d{1,15}(\.\d{1,6})?)\s*(?P<unit>[kMGT]?)(?P<binary>i?)B?(/s)?")
_LEAST_RATE = 2**16


class Command(click.Command):
    """A command whose help ends with the exit codes it can have."""

    def __init__(self, *args: Any, codes: Iterable[ExitCode] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.codes = sorted({*_ALWAYS, *codes})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click's own. Wrong usage names this command, whose help says more."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes below the options."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), code.meaning) for code in self.codes])


class RunsAnother(Command):
    """A command that runs COMMAND, with ``--`` before it: else options of COMMAND that are ours too, such as --config,
    would silently be ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_marked, count = "--" in args, len(args)  # they are used up
        try:
            left = super().parse_args(ctx, args)
        except click.UsageError as error:
            if not is_marked and count > 1:
                raise click.UsageError("write -- before COMMAND", ctx) from error
            raise
        if not is_marked and ctx.params.get("argv") and not ctx.resilient_parsing:
            raise click.UsageError("write -- before COMMAND", ctx)
        return left


class PathOrUrl(click.Path):
    """A path or URL. An empty one is refused: it is an unset variable of a script, and would mean this folder. What
    cannot be read is no wrong usage: the command says so, with its own exit code."""

    def __init__(self) -> None:
        super().__init__(readable=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
config_option = click.option(
    "--config",
    metavar="FILE",
    help="Use this settings file, not ./ckptguard.toml.",
    type=click.Path(readable=False),
)
records_option = click.option("--records", metavar="URL", help="Keep the records here, not in RUN/_ckptguard.")


def _be_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        be_quiet()


quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=_be_quiet,
    help="Print only what is wrong, and no progress bar.",
)


class Shared(NamedTuple):
    """What may be said to every command, by `shared_options`."""

    as_json: bool = False
    config: str | None = None
    records: str | None = None

    def settings(self, targets: Sequence[str], **flags: object) -> Settings:
        """Flags, else ``CKPTGUARD_*``, else the file, else defaults. Empty lists count as not given. `targets` are what
        the command is about."""
        from ckptguard.runs.settings_file import load_settings

        given = {name: value for name, value in flags.items() if value != ()}
        return load_settings(self.config, os.environ, targets, say=warn, records=self.records, **given)


def warn(sentence: str) -> None:
    """Say on stderr what should be known, and is no error."""
    trouble(f"warning: {sentence}")


def shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --json and the options of the settings; the command gets them as `shared`."""

    @json_option
    @config_option
    @records_option
    @functools.wraps(command)
    def with_shared(as_json: bool, config: str | None, records: str | None, **own: Any) -> None:
        command(shared=Shared(as_json, config, records), **own)

    return with_shared


def parse_rate(text: str) -> float:
    """Bytes a second, as users write them: ``100MB``, ``50MiB/s``. BadParameter of --rate."""
    match = _RATE.fullmatch(text)
    amount = 0.0
    if match is not None:
        amount = float(match["amount"]) * (1024 if match["binary"] else 1000) ** " kMGT".index(match["unit"] or " ")
    if not _LEAST_RATE <= amount < 1e15:
        raise click.BadParameter(f"{text!r} is no rate of 65536 bytes a second or more", param_hint="--rate")
    return amount
