"""What messages, hints and help name exists: every command, every option of it, every setting."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import ckptguard_daemon.command as daemon
import click
import msgspec
import pytest

import ckptguard
from ckptguard.cli.entry import COMMANDS, commands
from ckptguard.values.settings import Settings

PACKAGE, DAEMON = Path(ckptguard.__file__).parent, Path(daemon.__file__).parent
_COMMAND = re.compile(r"(?<![\w./-])ckptguard ([a-z][a-z-]*)")
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*\d?)")
_QUOTED = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_END = re.compile(r"[`;:]|\.\s")
# Words that follow the name of the project in a sentence.
PROSE = {
    "allows",
    "can",
    "cannot",
    "does",
    "has",
    "if",
    "is",
    "lists",
    "never",
    "reads",
    "unpacks",
}  # words that follow the name of the project in a sentence
# What is quoted and is none of our settings or commands: other programs, arguments in Python, parameters of requests.
OTHERS = {"md5sum -c", "sha512sum --tag", "b2sum --tag", "ckptguard.toml", "name", "seconds", "step", "path"}
OTHERS |= {"folders", "depth"}  # keys of a fleet file
OTHERS |= {"rm -rf RUN", "git lfs pull", "format.json"}  # other programs, a file of the records
OTHERS |= {"expires", "reason", "to", "Last-Event-ID"}  # of a token's line, of a body, of a query, of a header


def texts() -> Iterator[tuple[str, str]]:
    """Every text of the code that people may read, with its place; docstrings only where they are help."""
    for path in sorted([*PACKAGE.rglob("*.py"), *DAEMON.rglob("*.py")]):
        tree = ast.parse(path.read_text("utf-8"))
        left_out = set()
        for node in ast.walk(tree):
            is_help = isinstance(node, ast.FunctionDef) and "click." in "".join(map(ast.unparse, node.decorator_list))
            documented = (
                isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not is_help
            )
            if documented and ast.get_docstring(node, clean=False) is not None:
                left_out.add(id(node.body[0].value))
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                left_out |= {id(part) for part in node.values}
                parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                yield f"{path.name}:{node.lineno}", "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
                yield f"{path.name}:{node.lineno}", node.value


def options_of(command: click.Command) -> set[str]:
    """The options that a command takes, without their dashes."""
    own = {name.lstrip("-") for parameter in command.params for name in parameter.opts if name.startswith("--")}
    return own | {"help", "version"}


def command_named(name: str) -> click.Command:
    """One of our commands."""
    found = commands.get_command(click.Context(commands), name)
    assert found is not None
    return found


OPTIONS = {name: options_of(command_named(name)) for name in COMMANDS}
ANY_OPTION = set.union(*OPTIONS.values(), options_of(daemon.command))
SETTINGS = {field.name for field in msgspec.structs.fields(Settings)}


def wrong_names(text: str) -> list[str]:
    """What a text names and is not there."""
    named = [match for match in _COMMAND.finditer(text) if match[1] not in PROSE]
    wrong = [f"ckptguard {match[1]}" for match in named if match[1] not in COMMANDS]
    others = [range(*quoted.span()) for quoted in _QUOTED.finditer(text) if quoted[1] in OTHERS]
    for match in _OPTION.finditer(text):
        if any(match.start() in span for span in others):
            continue
        # A command that is written out goes on to the end of its quotation, or of the sentence.
        before = [
            one[1] for one in named if one.end() <= match.start() and not _END.search(text, one.end(), match.start())
        ]
        known = OPTIONS.get(before[-1], ANY_OPTION) if before else ANY_OPTION
        if match[1] not in known:
            wrong.append(match[0])
    for quoted in _QUOTED.findall(text):
        known = quoted in SETTINGS | set(COMMANDS) | OTHERS
        if not known and not re.search(r"\bckptguard(?:-daemon)? |\0", quoted):
            wrong.append(quoted)
    return wrong


def test_everything_that_is_named_exists() -> None:
    """A message must not send anybody to an option, a command or a setting that is not there."""
    found = list(texts())
    assert sum("ckptguard " in text for _, text in found) > 50
    assert [(place, wrong) for place, text in found if (wrong := wrong_names(text)) and not is_pattern(text)] == []


def is_pattern(text: str) -> bool:
    """Whether a text is a regular expression, which quotes what others say."""
    return "\\w" in text or "\\$" in text or "`?" in text or ".*?" in text


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("see: ckptguard verfy RUN", ["ckptguard verfy"]),
        ("ckptguard show RUN --step 3", ["--step"]),
        ("start it with --no-such-thing", ["--no-such-thing"]),
        ("set `keep_god` to 3", ["keep_god"]),
        ("what ckptguard cannot know, `keep_good` says; ckptguard verify RUN --step 3", []),
    ],
)
def test_wrong_names_are_found(text: str, wrong: list[str]) -> None:
    """The law above can fail."""
    assert wrong_names(text) == wrong
