"""The README is kept by tests where it repeats what the code says."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from ckptguard.cli.entry import COMMANDS
from ckptguard.config import Settings

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_lines_are_the_two_commands():
    """Who opens the README sees at once what to type."""
    lines = [line for line in TEXT.splitlines() if line][1:4]
    assert [line.split("#")[0].strip() for line in lines] == ["```", "python dev.py demo", "python dev.py test"]


def test_the_table_of_settings_is_complete():
    """Every setting is in the table, in order, with its default."""
    table = TEXT.partition("## Settings")[2].partition("## Words")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) ?\|", table, re.MULTILINE))
    told = {name: tomllib.loads(f"x = {text}")["x"] if text else None for name, text in rows.items()}
    assert list(told.items()) == [(f.name, plain(f.default)) for f in msgspec.structs.fields(Settings)]


def plain(value):
    """A default as TOML would say it."""
    return list(value) if isinstance(value, tuple) else value


def test_every_command_is_named():
    """The table of commands names each of them."""
    table = TEXT.partition("## Commands")[2].partition("### Exit codes")[0]
    assert set(re.findall(r"`([a-z-]+)(?: [^`]*)?`", table)) >= set(COMMANDS)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name):
    """Every relative link of the documents is a file of the repository."""
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_python_examples_are_python():
    """The README's starts compile."""
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        compile(block, "README.md", "exec")


def test_the_torch_that_is_installed_is_the_one_told():
    """The README and dev.py name the same torch."""
    assert '"CKPTGUARD_TORCH", "torch==2.13.0"' in (ROOT / "dev.py").read_text(encoding="utf-8")
    assert "`torch==2.13.0`" in TEXT
