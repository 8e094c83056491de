"""What commands share: exit codes in their help, the options that make their settings, and kinds of arguments."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ckptguard.errors import SettingsError
from ckptguard.terminal.output import be_quiet, warn
from ckptguard.values.exit_codes import ExitCode

if TYPE_CHECKING:
    from ckptguard.values.settings import Settings

_ALWAYS = (ExitCode.GOOD, ExitCode.FAILED, ExitCode.USAGE, ExitCode.INTERRUPTED)
_LEAST_RATE = 2**16


class Shared(NamedTuple):
    """What may be said to every command that has these options."""

    as_json: bool = False
    config: str | None = None
    records: str | None = None
    no_plugins: bool = False

    def settings(self, targets: Sequence[str], **flags: object) -> Settings:
        """Flags, else ``CKPTGUARD_*``, else the file, else defaults. Empty lists count as not given. `targets` are what
        the command is about."""
        from ckptguard.runs.settings_file import load_settings

        given = {name: value for name, value in flags.items() if value != ()}
        given |= {"no_plugins": True} if self.no_plugins else {}
        return load_settings(self.config, os.environ, targets, say=warn, records=self.records, **given)


def _be_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        be_quiet()


COMMON = {
    "quiet": click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=_be_quiet,
        help="Print only what is wrong, and no progress bar.",
    ),
    "json": click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document instead of text."),
    "config": click.Option(
        ["--config"],
        metavar="FILE",
        help="Use this settings file, not ./ckptguard.toml.",
        type=click.Path(readable=False),
    ),
    "no_plugins": click.Option(["--no-plugins"], is_flag=True, help="Use no plugins of other packages."),
    "records": click.Option(["--records"], metavar="URL", help="Keep the records here, not in RUN/_ckptguard."),
}


class Command(click.Command):
    """A command whose help ends with the options that many have, and with the exit codes it can have.

    `common` names these options, of `COMMON`. The command gets what was said with them as `shared`.
    """

    def __init__(self, *args: Any, codes: Iterable[ExitCode] = (), common: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.codes = sorted({*_ALWAYS, *codes})
        self.params += [COMMON[name] for name in common.split()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click's own. Wrong usage names this command, whose help says more."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Click's own, with the shared options as one value."""
        said = {name: ctx.params.pop(name) for name in Shared._fields if name in ctx.params}
        if said:
            ctx.params["shared"] = Shared(**said)
        return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes below the options."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), code.meaning) for code in self.codes])


def command(
    name: str,
    short_help: str,
    codes: Iterable[ExitCode] = (),
    *,
    common: str = "json config records",
    cls: type[Command] = Command,
) -> Callable[[Callable[..., None]], Command]:
    """Declare a command of this name, with its own exit codes beside those of all."""
    return click.command(name, cls=cls, short_help=short_help, codes=codes, common=common)


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


class Parsed(click.ParamType):  # type: ignore[type-arg]  # only newer releases of click have one
    """Text that a function of ours reads, given as MODULE:FUNCTION. It is imported once the option is used. What it
    refuses is wrong usage of the option."""

    def __init__(self, name: str, place: str) -> None:
        self.name, self._place = name, place

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what the function makes of the text."""
        module, _, function = self._place.partition(":")
        try:
            return getattr(importlib.import_module(module), function)(value)
        except SettingsError as error:
            self.fail(error.message + (f": {error.hint}" if error.hint else ""), param, ctx)


class ShortText(click.ParamType):  # type: ignore[type-arg]
    """Text for a record."""

    name = "text"
    longest = 1000  # characters

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse what is too long."""
        if len(value) > self.longest:
            self.fail(f"it has more than {self.longest} characters", param, ctx)
        return value


SPAN = Parsed("span", "ckptguard.values.retention_policy:parse_span")
RATE = Parsed("rate", "ckptguard.cli.command:parse_rate")


def parse_rate(text: str) -> float:
    """Return bytes a second, as users write them: ``100MB``, ``50MiB/s``. Raises SettingsError."""
    from ckptguard.values.byte_sizes import parse_size

    amount = 0.0
    with contextlib.suppress(SettingsError):
        amount = float(parse_size(text.removesuffix("/s")))
    if not _LEAST_RATE <= amount < 1e15:
        raise SettingsError(f"{text!r} is no rate of 65536 bytes a second or more")
    return amount
