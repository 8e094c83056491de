"""Wrong usage is told in our own words, whatever the command and the option."""

import click
import click.testing
import pytest
from ckptguard_daemon.command import command as daemon

from ckptguard.cli.entry import COMMANDS, commands

CLICKS_WORDS = (
    *(
        "is not a valid",
        "is not in the range",
        "is not one of",
        "Invalid value",
        "Missing",
        "No such",
        "Got unexpected",
    ),
    *("requires an argument", "does not take a value", "Error:", "Usage:", "Try '", "integer", "float"),
)


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
def test_wrong_usage_is_one_sentence_of_ours(invoke, arguments):
    """One line says what is wrong, one where to read on; and it is wrong usage."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    first, second = result.stderr.splitlines()
    assert first.startswith("error: ")
    assert second == f"hint: ckptguard {arguments[0]} --help"
    assert [words for words in CLICKS_WORDS if words in first.replace("'x'", "")] == []


@pytest.mark.parametrize(("command", "option"), [("verify", "--executor"), ("scrub", "--subset")])
def test_an_option_that_went_says_what_to_use(invoke, command, option):
    """It is wrong usage, and a sentence helps. Where there never was such an option, none does."""
    for name, told in ((command, True), ("list", False)):
        result = invoke(name, "run", option, "x")
        assert (result.exit_code, f"there is no option {option}" in result.stderr) == (2, True)
        assert ("any more: " in result.stderr) is told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nosuch", "run"), "there is no option --nosuch"),
        (
            ("--interval", "5", "run"),
            "there is no option --interval any more: use the setting scan_interval, or CKPTGUARD_SCAN_INTERVAL",
        ),
        (
            ("--records", "x", "run"),
            "there is no option --records any more: use the setting records, or CKPTGUARD_RECORDS",
        ),
        (("--settle", "5", "run"), "there is no option --settle any more: use the setting settle, or CKPTGUARD_SETTLE"),
        (("--parent", "x", "run"), "--parent: it must be a whole number, not 'x'"),
        (("--log-format", "x", "run"), "--log-format: it must be auto, text or json, not 'x'"),
        (("--parent",), "--parent needs a value after it"),
    ],
)
def test_the_daemon_tells_wrong_usage_in_the_same_words(arguments, words):
    """Its own options, too, and those that it once had."""
    done = click.testing.CliRunner().invoke(daemon, arguments, prog_name="ckptguard-daemon")
    assert (done.exit_code, done.stderr) == (2, f"error: {words}\nhint: ckptguard-daemon --help\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("restore", "run", "--step", "x"), "--step: it must be a whole number of 0 or more, not 'x'"),
        (("verify", "run", "--workers", "1000"), "--workers: it must be a whole number from 1 to 256, not '1000'"),
        (("verify", "run", "--digest", "x"), "--digest: it must be md5 or blake3, not 'x'"),
        (("verify",), "TARGET is missing"),
        (("completion", "x"), "SHELL: it must be bash, zsh or fish, not 'x'"),
        (("verify", "run", "--stpe", "3"), "there is no option --stpe: did you mean --step?"),
        (("verify", "--step"), "--step needs a value after it"),
        (("verify", "run", "--json=1"), "--json takes no value"),
        (("verify", "run", "a", "b"), "there are too many arguments: a b"),
        (("incident", "run", "--html", "/"), "--html: '/' is a folder"),
    ],
)
def test_the_sentence_says_what_would_be_right(invoke, arguments, words):
    """What it must be, and what it was."""
    assert invoke(*arguments).stderr.splitlines()[0] == f"error: {words}"
