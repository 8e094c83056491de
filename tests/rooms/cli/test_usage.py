"""Wrong usage is one sentence and a hint, whatever the command and the option."""

import click
import click.testing
import pytest
from ckptguard_daemon.command import command as daemon

from ckptguard.cli.entry import COMMANDS, commands


def wrong_usages():
    """Command lines that are wrong in every way that click knows, for all commands and options."""
    for name in COMMANDS:
        command = commands.get_command(click.Context(commands), name)
        required = [p for p in command.params if isinstance(p, click.Argument) and p.required]
        values = [p.type.choices[0] if isinstance(p.type, click.Choice) else "x" for p in required]
        values = ["x", "--", "true"] if name == "supervise" else values
        yield (name, "--no-such-option", *values)
        if required:
            yield (name,)
        if name != "supervise" and all(p.nargs == 1 for p in command.params):
            yield (name, *values, *"abcdefg")
        for option in (p for p in command.params if isinstance(p, click.Option)):
            said = max(option.opts, key=len)
            if option.is_flag:
                yield (name, f"{said}=1", *values)
                continue
            yield (name, *(values if name != "supervise" else ()), said)
            if isinstance(option.type, click.Choice | click.types.IntParamType | click.types.FloatParamType):
                yield (name, said, "nonsense", *values)
            if isinstance(option.type, click.IntRange | click.FloatRange) and option.type.min is not None:
                yield (name, said, str(option.type.min - 1), *values)


@pytest.mark.parametrize("arguments", list(wrong_usages()), ids=" ".join)
def test_wrong_usage_is_one_line_and_a_hint(invoke, arguments):
    """One line says what is wrong, one where to read on; and it is wrong usage."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    first, second = result.stderr.splitlines()
    assert first.startswith("error: ")
    assert len(first) > len("error: ")
    assert second == f"hint: ckptguard {arguments[0]} --help"


@pytest.mark.parametrize(("command", "option"), [("verify", "--executor"), ("scrub", "--subset"), ("list", "--watch")])
def test_an_option_that_went_says_what_to_use(invoke, command, option):
    """It is wrong usage, and a sentence helps. Where there never was such an option, none does."""
    for name, told in ((command, True), ("sums", False)):
        result = invoke(name, "run", option, "x")
        assert (result.exit_code, option in result.stderr) == (2, True)
        assert ("any more: " in result.stderr) is told


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--open", "open the link that it prints"),
        ("--interval", "use the setting scan_interval, or CKPTGUARD_SCAN_INTERVAL"),
        ("--records", "use the setting records, or CKPTGUARD_RECORDS"),
        ("--settle", "use the setting settle, or CKPTGUARD_SETTLE"),
    ],
)
def test_the_daemon_tells_wrong_usage_in_the_same_words(option, instead):
    """Of options that it once had, what to use instead."""
    done = click.testing.CliRunner().invoke(daemon, (option, "5", "run"), prog_name="ckptguard-daemon")
    words = f"there is no option {option} any more: {instead}"
    assert (done.exit_code, done.stderr) == (2, f"error: {words}\nhint: ckptguard-daemon --help\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("restore", "run", "--step", "x"), ("--step", "x")),
        (("verify", "run", "--workers", "1000"), ("--workers", "1000", "1", "256")),
        (("verify", "run", "--digest", "x"), ("--digest", "x", "md5", "blake3")),
        (("verify",), ("TARGET",)),
        (("completion", "x"), ("bash", "zsh", "fish")),
        (("verify", "run", "--stpe", "3"), ("--stpe", "--step")),
        (("verify", "--step"), ("--step",)),
        (("verify", "run", "--json=1"), ("--json",)),
        (("verify", "run", "a", "b"), ("a b",)),
        (("incident", "run", "--html", "/"), ("--html", "/")),
    ],
)
def test_the_sentence_says_what_would_be_right(invoke, arguments, words):
    """It names the option or argument, what was given, and what may be."""
    said = invoke(*arguments).stderr.splitlines()[0]
    assert [word for word in words if word not in said] == []
