"""Everything that people read is plain English: documents and the command line's own help."""

from pathlib import Path

import click
import pytest

from ckptguard.cli.entry import COMMANDS, commands
from ckptguard_daemon.__main__ import command as daemon
from support.prose import complaints, long_lines, sentences

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "daemon/README.md", *sorted(ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_documents_are_plain(page):
    """No sentence is long, no line is wide, and no word is one that only we know."""
    text = page.read_text(encoding="utf-8")
    assert complaints(text) + long_lines(text) == []


@pytest.mark.parametrize("name", [*COMMANDS, "daemon"])
def test_the_help_is_plain(name):
    """The same holds for what each command says of itself and of its options."""
    command = daemon if name == "daemon" else commands.get_command(click.Context(commands), name)
    assert command is not None
    helps = [command.help or "", *(p.help or "" for p in command.params if isinstance(p, click.Option))]
    assert [found for text in helps for found in complaints(text)] == []


def test_the_check_finds_what_it_is_for():
    """A long sentence, a private word and a wide line are found; code, tables and short sentences are left alone."""
    long = "This sentence " + "goes on and " * 12 + "ends."
    assert len(complaints(long)) == 1
    assert len(complaints("They vouch for it.")) == 1
    assert complaints("It is `one two three four five` here. That is short, e.g. like this one.") == []
    assert complaints(f"```\n{long} vouch\n```\n") == []
    assert long_lines("x" * 101 + "\n| " + "x" * 101) == ["x" * 101]
    assert list(sentences("- One thing. Another [thing](a.md)!\n- Third")) == ["One thing.", "Another thing!", "Third"]
