"""What every command shares: exit codes in its help, and the options that make its settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import click

from ckptguard.cli.exit_codes import MEANINGS, ExitCode

if TYPE_CHECKING:
    from ckptguard.values.settings import Settings

_ALWAYS = (ExitCode.GOOD, ExitCode.FAILED, ExitCode.USAGE, ExitCode.INTERRUPTED)
_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


class Shared(TypedDict):
    """What may be said to every command, by `json_option` and `settings_options`."""

    as_json: bool
    config: str | None
    records: str | None


class Command(click.Command):
    """A command whose help ends with the exit codes it can have."""

    def __init__(self, *args: Any, codes: Iterable[ExitCode] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.codes = sorted({*_ALWAYS, *codes})

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes below the options."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), MEANINGS[code]) for code in self.codes])


class Place(click.Path):
    """A path or URL. An empty one is refused: it is an unset variable of a script, and would mean this folder. What
    cannot be read is no wrong usage: the command says so, with its own exit code."""

    def __init__(self) -> None:
        super().__init__(readable=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The text as it was given."""
        if not value:
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


def settings_options(command: _Decorated) -> _Decorated:
    """Add the options of which `settings_from` makes the settings."""
    config = click.option(
        "--config", metavar="FILE", help="Settings (TOML) instead of ./ckptguard.toml.", type=click.Path(readable=False)
    )
    records = click.option("--records", metavar="URL", help="Where the records are, if not in RUN/_ckptguard.")
    return config(records(command))


def settings_from(config: str | None, records: str | None = None, **flags: object) -> Settings:
    """The settings: flags, else ``CKPTGUARD_*``, else the file, else defaults. Empty lists count as not given."""
    from ckptguard.runs.settings_file import load_settings

    given = {name: value for name, value in flags.items() if value != ()}
    return load_settings(config, os.environ, records=records, **given)
