"""The documents say what is true: their links lead somewhere, their code runs, their sessions are what is printed."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import msgspec
import pytest
import refresh
import sandbox
from ckptguard_daemon.__main__ import command as daemon_command
from names import names
from support.markdown import DOCS, ROOT, anchors, blocks, links, pages, prose, wide_lines
from support.prose import problems

import ckptguard
from ckptguard.values.settings import Settings, parse_settings
from ckptguard.values.storage_options import StorageOptions

ALL = pages()
# What may stand before a command of ours on a line.
BEFORE = {"nice", "srun", "exec", "!", "uvx", "$", "sudo"}


def called(path):
    """A page's name in the list of tests."""
    return str(path.relative_to(ROOT))


def having(*languages):
    """The pages that have a block of one of these languages."""
    return [page for page in ALL if any(b.language in languages for b in blocks(page.read_text(encoding="utf-8")))]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A sandbox that nobody works in: pages get copies."""
    folder = tmp_path_factory.mktemp("filled")
    sandbox.fill(folder)
    return folder


@pytest.fixture
def workplace(filled, tmp_path, monkeypatch):
    """A sandbox of this test's own, entered; no settings of this machine leak in."""
    for name in [n for n in os.environ if n.startswith("CKPTGUARD_")]:
        monkeypatch.delenv(name)
    sandbox.copy(filled, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", ALL, ids=called)
def test_the_page_is_plain(page):
    """No sentence is long, no line is wide, no word is one that only we know."""
    text = page.read_text(encoding="utf-8")
    assert problems(prose(text)) + wide_lines(text) == []


@pytest.mark.parametrize("page", [*ALL, ROOT / "CHANGELOG.md"], ids=called)
def test_links_lead_somewhere(page):
    """Every link to a file of the repository finds it, and the heading that it names."""
    lost = []
    for link in links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            lost.append(link)
        # The site has only what lies below docs/.
        if page.is_relative_to(DOCS) and not target.is_relative_to(DOCS):
            lost.append(link)
    assert lost == []


def test_every_page_is_in_the_site():
    """mkdocs.yml names each page once, and no other."""
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in ALL if page.is_relative_to(DOCS))


@pytest.mark.parametrize(("path", "text"), refresh.generated().items(), ids=lambda x: getattr(x, "stem", ""))
def test_generated_pages_are_current(path, text):
    """The pages of the commands say what the code says. `python dev.py docs --refresh` writes them."""
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.torch
@pytest.mark.parametrize("page", having("console"), ids=called)
def test_sessions_are_what_is_printed(page, filled):
    """A session shows what its commands print, but for numbers. `python dev.py docs --refresh` writes them."""
    assert refresh.alike(refresh.refreshed(page, filled)) == refresh.alike(page.read_text(encoding="utf-8"))


@pytest.mark.torch
@pytest.mark.parametrize("page", having("python"), ids=called)
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


@pytest.mark.parametrize("page", having("sh"), ids=called)
def test_shell_lines_are_commands_that_exist(page):
    """bash can read every block, and every command of ours in it has the options and arguments that it is given."""
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


@pytest.mark.parametrize("page", having("toml", "json", "yaml"), ids=called)
def test_settings_and_documents_can_be_read(page):
    """Every block of TOML is a file of settings, and every other one is what it says."""
    yaml = pytest.importorskip("yaml")
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "toml" and not block.mark.startswith("not settings"):
            parse_settings(block.text, str(page))
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            assert list(yaml.safe_load_all(block.text))


def test_the_settings_are_complete():
    """Every setting is in a table of its page, with its default."""
    text = (DOCS / "reference/settings.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\|", text, re.MULTILINE))
    told = {name: tomllib.loads(f"x = {text}")["x"] if text else None for name, text in rows.items()}
    assert told == {f.name: plain(f.default) for f in msgspec.structs.fields(Settings)}


def plain(value):
    """A default as TOML would say it."""
    if isinstance(value, StorageOptions):
        return value.revealed() or None
    return list(value) if isinstance(value, tuple) else value


def test_the_site_builds(tmp_path):
    """The site builds without a warning, and asks no other machine for anything."""
    if not os.environ.get("CI"):
        pytest.importorskip("zensical", reason="the extra docs")
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    built = [page.read_text(encoding="utf-8") for page in Path(tmp_path, "site").glob("**/*.html")]
    assert len(built) > len(list(DOCS.glob("**/*.md")))
    loaded = r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:)?//[^>]*"
    assert [m[0] for page in built for m in re.finditer(loaded, page) if 'rel="canonical"' not in m[0]] == []
