"""Wrong usage in our own words: what is wrong with which option or argument, and where its help is."""

from __future__ import annotations

import re
from typing import IO, Any

import click

from ckptguard.terminal.output import trouble

_VALUE = re.compile(r"(?P<value>.*) is not (a valid|in the range|one of)", re.DOTALL)
_PLACE = re.compile(
    r"(File|Directory|Path) (?P<value>.*) (?P<wrong>does not exist|is a file|is a directory)\.", re.DOTALL
)
# What to use instead of options that a command once had.
_REMOVED = {
    ("ckptguard-daemon", "settle"): "use the setting settle, or CKPTGUARD_SETTLE",
    ("ckptguard-daemon", "interval"): "use the setting scan_interval, or CKPTGUARD_SCAN_INTERVAL",
    ("ckptguard-daemon", "records"): "use the setting records, or CKPTGUARD_RECORDS",
    ("verify", "executor"): "it reads in threads, as many as the setting workers says",
    ("scrub", "subset"): "use --max-duration, and the next scrub goes on where it stopped",
}
_WRONG = {"does not exist": "does not exist", "is a file": "is a file", "is a directory": "is a folder"}


class WrongUsage(click.UsageError):
    """Wrong usage, told as all our errors are: one sentence, and one that says what to do."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Write both to stderr."""
        trouble(f"error: {self.message}")
        if self.ctx is not None:
            trouble(f"hint: {self.ctx.command_path} --help")


def restated(error: click.UsageError) -> click.UsageError:
    """The same error in our words; help that was asked for by giving no arguments is left as it is."""
    if isinstance(error, WrongUsage | click.exceptions.NoArgsIsHelpError):
        return error
    return WrongUsage(_words(error), error.ctx)


def _words(error: click.UsageError) -> str:
    if isinstance(error, click.MissingParameter):
        return f"{_name_of(error)} is missing"
    if isinstance(error, click.BadParameter):
        return f"{_name_of(error)}: {_of_value(error)}"
    if isinstance(error, click.NoSuchOption):
        instead = _REMOVED.get((error.ctx.info_name or "" if error.ctx else "", error.option_name.removeprefix("--")))
        if instead is not None:
            return f"there is no option {error.option_name} any more: {instead}"
        return _with_guess(f"there is no option {error.option_name}", error.possibilities)
    if isinstance(error, click.exceptions.NoSuchCommand):
        return _with_guess(f"there is no command {error.command_name}", error.possibilities)
    if isinstance(error, click.BadOptionUsage):
        needs = "takes no value" if "does not take" in error.message else "needs a value after it"
        return f"{error.option_name} {needs}"
    extra = re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", error.message, re.DOTALL)
    if extra is not None:
        return f"there are too many arguments: {extra[1]}"
    return "say which command" if error.message == "Missing command." else error.message


def _with_guess(text: str, names: list[str] | None) -> str:
    return f"{text}: did you mean {names[0]}?" if names else text


def _name_of(error: click.BadParameter) -> str:
    """The option or argument as it is written on the command line."""
    if error.param_hint is not None:
        return error.param_hint if isinstance(error.param_hint, str) else " or ".join(error.param_hint)
    if isinstance(error.param, click.Option):
        return max(error.param.opts, key=len)
    named = error.param.metavar or error.param.human_readable_name.upper() if error.param is not None else "an argument"
    return named.strip("[].")


def _of_value(error: click.BadParameter) -> str:
    """What is wrong with the value that was given."""
    kind = error.param.type if error.param is not None else None
    found = _VALUE.match(error.message)
    wanted = None if found is None else _wanted(kind)
    if found is not None and wanted is not None:
        value = found["value"]
        return f"it must be {wanted}, not {value if value.startswith(chr(39)) else repr(value)}"
    place = _PLACE.fullmatch(error.message)
    return error.message if place is None else f"{place['value']} {_WRONG[place['wrong']]}"


def _wanted(kind: object) -> str | None:
    """What a type takes."""
    if isinstance(kind, click.Choice):
        names = [str(choice) for choice in kind.choices]
        return f"{', '.join(names[:-1])} or {names[-1]}"
    noun = {"integer": "a whole number", "float": "a number"}.get(str(getattr(kind, "name", "")).removesuffix(" range"))
    if noun is None or not isinstance(kind, click.IntRange | click.FloatRange):
        return noun
    if kind.min is not None and kind.max is not None:
        return f"{noun} from {_number(kind.min)} to {_number(kind.max)}"
    return f"{noun} of {_number(kind.min)} or more" if kind.min is not None else noun


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
