"""Plain English in the source: docstrings, comments and messages. Nothing is imported from the packages."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.code_texts import texts_of
from tests.support.prose import MAX_WORDS, private_names, private_words, problems

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "ckptguard", ROOT / "daemon")
ROOMS = [
    *(folder for folder in sorted(PACKAGES[0].iterdir()) if folder.is_dir() and any(folder.rglob("*.py"))),
    *sorted(PACKAGES[0].glob("*.py")),
    PACKAGES[1],
]
LONG = " ".join(["word"] * (MAX_WORDS + 1))
SHORT = " ".join(["word"] * MAX_WORDS)


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.name)
def test_a_room_is_in_plain_english(room: Path) -> None:
    """No word is private in what a package's files and its users' terminals say, and no sentence of a message is long.
    A docstring or comment may have the length that an engineer would give it."""
    files = [room] if room.is_file() else sorted(room.rglob("*.py"))
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {kind}: {problem}"
        for file in files
        for line, kind, text in texts_of(file.read_text())
        for problem in (problems(text) if kind == "message" else private_words(text))
    ]
    assert not wrong, "\n".join(wrong)


def identifiers(tree: ast.AST) -> Iterator[str]:
    """What a module names: classes, functions, their parameters, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_names_are_those_that_engineers_use() -> None:
    """No file, class, function, parameter, variable or attribute has a private word in its name."""
    wrong = set()
    for path in (file for package in PACKAGES for file in package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name in {path.stem, *identifiers(tree)}:
            wrong |= {f"{path.relative_to(ROOT)}: {problem}" for problem in private_names(name)}
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize("source", ["class OwedWork: ...", "def f(patience): ...", "def mend(): ...", "a.told = 1"])
def test_a_private_name_is_found(source: str) -> None:
    """Wherever it is given."""
    assert any(private_names(name) for name in identifiers(ast.parse(source)))


def test_every_file_is_read() -> None:
    """The rooms cover both packages, and the walk finds the texts in them."""
    files = {file for package in PACKAGES for file in package.rglob("*.py")}
    assert files == {file for room in ROOMS for file in ([room] if room.is_file() else room.rglob("*.py"))}
    kinds = Counter(kind for file in files for _, kind, text in texts_of(file.read_text()) if len(text.split()) > 3)
    for kind, least in (("docstring", 2000), ("comment", 400), ("message", 1000)):
        assert kinds[kind] > least, kinds


@pytest.mark.parametrize("words", [LONG, "its own bytes are kept thereof"], ids=["long", "private"])
@pytest.mark.parametrize(
    "place",
    [
        '"""{}."""',
        'def f() -> None:\n    """Good.\n\n    - {}\n    """',
        'class C:\n    a: int\n    """{}."""',
        "# {}",
        "a = 1  # {}",
        'raise SettingsError("a {}")',
        'raise SettingsError(f"{{a}} {} {{b!r}}")',
        'Finding(check="x", message=f"{{a}} is bad: " + "{}", hint=None)',
        'log(f"a {{b}} "\n    "{}")',
        '_WHAT_TO_DO = "{}"',
        '@click.option("--a", help="{}")\ndef f() -> None: ...',
        "say(f\"{{a if b else '{}'}}\")",
        'say(a + "{}")',
    ],
)
def test_a_problem_is_found_wherever_it_is(place: str, words: str) -> None:
    """A long sentence or a private word is found in a docstring, a comment or a message, however it is written."""
    assert any(problems(text) for _, _, text in texts_of(place.format(words)))
    assert not any(problems(text) for _, _, text in texts_of(place.format("it is good")))


def test_the_parts_of_a_message_are_one_sentence() -> None:
    """A hole counts as one word; a sentence split over strings is as long as its parts together."""
    assert not any(problems(text) for _, _, text in texts_of(f'say("{SHORT}")'))
    assert any(problems(text) for _, _, text in texts_of(f'say(f"{SHORT} {{a}}")'))
    assert any(problems(text) for _, _, text in texts_of(f'say("{SHORT} " + a)'))
    lines = "\n".join(f"# {half}" for half in (SHORT, "and more"))
    assert any(problems(text) for _, _, text in texts_of(lines))


def test_patterns_and_tables_of_words_are_no_sentences() -> None:
    """A regular expression and a list of words that the file splits may be as long as they need."""
    table = f'_TABLE = "{LONG}"\nNAMES = _TABLE.split()\nOTHERS = "{LONG}".split()'
    assert not any(problems(text) for _, _, text in texts_of(table))
    assert not any(problems(text) for _, _, text in texts_of(f"P = re.compile(r'(?:{LONG})')"))
