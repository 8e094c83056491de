"""The code in the documents runs, and the options in it exist."""

import json
import re
import shlex
import subprocess
import tomllib

import click
import pytest
import refresh
from ckptguard_daemon.command import command as daemon_command
from names import names
from support.markdown import blocks, called, pages_with

import ckptguard
from ckptguard.fleet.find_runs import read_fleet
from ckptguard.values.settings import Settings, parse_settings

# What may stand before a command of ours on a line.
BEFORE = {"nice", "srun", "exec", "!", "uvx", "$", "sudo"}


@pytest.mark.torch
@pytest.mark.parametrize("page", pages_with("python"), ids=called)
def test_python_runs(page, workplace, monkeypatch):
    """Every block of Python runs, in the order of the page, shortened. One that is marked "not run: why" compiles,
    and every name of ckptguard in it is there."""
    monkeypatch.setenv("CKPTGUARD_SETTLE", "0")
    space = names(called(page))
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language != "python":
            continue
        code = block.text.replace("10_000", "20").replace("1_000", "20")
        code = re.sub(r"(save_every|save_steps)=\d+", r"\1=10", code)
        compiled = compile("\n" * (block.line - 1) + code, str(page), "exec")
        if block.mark.startswith("not run:"):
            for name in re.findall(r"\bckptguard((?:\.\w+)+)", code):
                assert resolves(name), name
            continue
        exec(compiled, space)
        close(space)


def resolves(name):
    """Whether an attribute of ckptguard, such as `.integrations.deepspeed.EngineGuard`, is there."""
    found = ckptguard
    for part in name.strip(".").split("."):
        if not hasattr(found, part):
            try:
                __import__(f"{found.__name__}.{part}")
            except ImportError:
                return False
        found = getattr(found, part)
    return True


def close(space):
    """End the guards that a block left open, as the end of its process would."""
    for value in list(space.values()):
        if isinstance(value, ckptguard.TrainingGuard):
            value.close()


@pytest.mark.parametrize("page", pages_with("sh"), ids=called)
def test_shell_lines_are_commands_that_exist(page, tmp_path, monkeypatch):
    """bash can read every block, and every command of ours in it has the options and arguments that it is given."""
    monkeypatch.chdir(tmp_path)  # `--example kubernetes` writes a folder
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "sh":
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
            for words in commands_in(block.text):
                parse(words)


def commands_in(text):
    """The commands of ours in a block of shell, as lists of words."""
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", "\n;"), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    for place, word in enumerate(words):
        before = words[place - 1] if place else ";"
        if word in ("ckptguard", "ckptguard-daemon") and (before in BEFORE or set(before) <= set("();|&$")):
            end = next((i for i in range(place, len(words)) if set(words[i]) <= set("();<>|&")), len(words))
            yield words[place:end]


def parse(words):
    """Fail if the command line would refuse these words as wrong usage."""
    command, rest = daemon_command, words[1:]
    if words[0] == "ckptguard":
        if rest[0].startswith("-"):
            return
        command, rest = refresh.command_of(rest[0]), rest[1:]
    try:
        # A variable of the shell may be anything: a number will do for all of them.
        command.make_context(words[0], [re.sub(r"\$(\$|\w+|\{[^}]*\})", "1", word) for word in rest])
    except click.exceptions.Exit:
        pass  # --help and --version


@pytest.mark.parametrize("page", pages_with("toml", "json", "yaml"), ids=called)
def test_settings_and_documents_can_be_read(page, tmp_path):
    """Every block of TOML is a file of settings or a fleet file, and every other one is what it says."""
    yaml = pytest.importorskip("yaml")
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "toml" and "folders" in tomllib.loads(block.text):
            (tmp_path / "fleet.toml").write_text(block.text, encoding="utf-8")
            assert read_fleet(str(tmp_path / "fleet.toml"), Settings())
        elif block.language == "toml":
            parse_settings(block.text, str(page))
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            assert list(yaml.safe_load_all(block.text))
