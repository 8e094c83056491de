"""Markdown as the tests of the documents read it: its code blocks, its headings, its links and its prose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
MOST_COLUMNS = 100


class Block(NamedTuple):
    """A fenced block of code. `mark` is the text of the comment right before it, or empty."""

    language: str
    text: str
    line: int
    mark: str
    span: tuple[int, int]  # of `text` in the page


def pages() -> list[Path]:
    """Every document that people read, in a fixed order."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("**/*.md"))]


def pages_with(*languages: str) -> list[Path]:
    """The pages that have a block of one of these languages."""
    return [page for page in pages() if any(b.language in languages for b in blocks(page.read_text(encoding="utf-8")))]


def called(page: Path) -> str:
    """A page's name in the list of tests."""
    return str(page.relative_to(ROOT))


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order, without their indentation."""
    for match in _BLOCK.finditer(text):
        indent = match["indent"]
        code = "\n".join(line.removeprefix(indent) for line in match["text"].split("\n"))
        before = text[: match.start()].rstrip()
        mark = before[before.rfind("<!--") + 4 : -3].strip() if before.endswith("-->") else ""
        yield Block(match["language"], code, text.count("\n", 0, match.start()) + 2, mark, match.span("text"))


def without_code(text: str) -> str:
    """A page without its fenced blocks and comments."""
    return _COMMENT.sub("", _BLOCK.sub("", text))


def prose(text: str) -> str:
    """What a reader reads of a page: paragraphs, items and cells, each followed by an empty line. Code is one word."""
    text = without_code(text)
    text = re.sub(r"(`+)(?!`).+?\1", "Code", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
    lines: list[str] = []
    for line in text.splitlines():
        plain = line.strip()
        if plain.startswith("|"):
            lines += [f"{cell.strip()}\n" for cell in plain.strip("|").split("|") if cell.strip(" -:")]
        elif re.match(r"([-*+]|\d+\.|#+|!!!|\?\?\?\+?) ", plain):
            lines += ["", re.sub(r"^([-*+]|\d+\.|#+|!!!|\?\?\?\+?) ", "", plain), *[""] * plain.startswith("#")]
        else:
            lines.append(plain)
    return "\n".join(lines)


def wide_lines(text: str) -> list[str]:
    """The lines of more than 100 columns. A row of a table, the address of a picture, a document and what a command
    prints cannot be broken."""
    for block in reversed([b for b in blocks(text) if b.language in ("console", "json", "text")]):
        text = text[: block.span[0]] + text[block.span[1] :]
    free = ("|", "![", "[![")
    return [line for line in text.splitlines() if len(line) > MOST_COLUMNS and not line.lstrip().startswith(free)]


def anchors(text: str) -> set[str]:
    """The names by which the headings of a page can be linked to."""
    titles = re.findall(r"^#+ (.*?)\s*$", without_code(text), re.MULTILINE)
    plain = [
        re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)).strip().lower() for title in titles
    ]
    return {re.sub(r"\s", "-", title) for title in plain}


def links(text: str) -> list[str]:
    """The targets of the links and pictures of a page."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(text)))
