"""Help: groups by task, from one table, and never wider than a terminal of 80 columns."""

from __future__ import annotations

import re

import click
import click.testing
import pytest
from ckptguard_daemon.command import command as daemon

from ckptguard.cli.entry import COMMANDS, GROUPS, commands


def test_help_has_every_command_in_its_group(invoke):
    """In the order of the table, each command once."""
    shown = invoke("--help").stdout
    at = [shown.index(f"{title}:") for title in GROUPS]
    assert at == sorted(at)
    for title, names in GROUPS.items():
        section = shown.partition(f"{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  ([a-z-]+) ", section, re.MULTILINE) == list(names)
    assert len(set(COMMANDS)) == len(COMMANDS)


@pytest.mark.parametrize("name", [None, *COMMANDS, "ckptguard-daemon"])
def test_help_fits_80_columns(name):
    """Every line of it, also those of options, and no option's metavar swallows the column of its text."""
    called, words = (daemon, []) if name == "ckptguard-daemon" else (commands, [name] if name else [])
    shown = click.testing.CliRunner().invoke(called, [*words, "--help"], prog_name="ckptguard").stdout
    assert shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert not re.search(r"^  -.*\[[a-z0-9]+\|[a-z0-9|]+\]$", shown, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name):
    """A sentence each, with an end."""
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    for option in (p for p in command.params if isinstance(p, click.Option)):
        assert option.help, option.name
        assert option.help.rstrip()[-1] in ".?", option.help
    assert command.short_help
    assert command.short_help.endswith(".") or command.short_help.endswith("?")
