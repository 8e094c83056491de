"""Whether a text is plain English: short sentences, short lines, and no word of ours where the field has one."""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST_WORDS = 25  # of a sentence
MOST_COLUMNS = 100  # of a line, outside of tables

# What nobody outside of this project would understand, and what to say instead.
WORDS = {
    r"\bso manieth\b": "every 16th",
    r"\bvouch\w*": "prove",
    r"\bbytes of (its|their) own\b": "an independent copy",
    r"\bheld against\b": "compared with",
    r"\bstands? back\b": "yield",
    r"\b(is|are|be) told of\b": "are notified about",
    r"\bsomebody's\b": "a person's",
    r"\blies? (aside|there)\b": "is there",
    r"\bin question\b": "suspect",
    r"\bspeaks? (only )?of itself\b": "describe",
    r"\bmade anew\b": "made again",
    r"\banew\b": "again, or from the start",
    r"\bowed\b": "still to do",
    r"\bthe house\b": "the code, or the packages",
    r"\bputs? (it|them|files|what|everything) right\b": "repair",
    r"\bput right\b": "repaired",
    r"\bwhat lies\b": "what is",
    r"\bthereof\b|\btherein\b|\bwherein\b|\bthereafter\b": "plain words",
    r"\bsays? of itself\b": "states",
    r"\butili[sz]e\b": "use",
    r"\bleverag\w+": "use",
    r"\bseamless\w*|\beffortless\w*|\bsimply\b|\bof course\b|\bobviously\b": "leave it out",
    r"\brobust\w*|\bpowerful\b|\bblazing\w*|\bcutting[- ]edge\b": "a figure, or leave it out",
}
_WORDS = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in WORDS.items()]

_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$\n?", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_END = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_`A-Z0-9])")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|No)\.\s")


def complaints(text: str) -> list[str]:
    """What is wrong with a text of Markdown or plain paragraphs: one line of explanation for each thing."""
    found = [f"{len(s.split())} words: {s}" for s in sentences(text) if len(s.split()) > MOST_WORDS]
    prose = "\n".join(paragraphs(text))
    found += [f"say {instead!r} for {m[0]!r}" for pattern, instead in _WORDS for m in pattern.finditer(prose)]
    return found


def long_lines(text: str) -> list[str]:
    """The lines that are too wide. A table's row, an address and a picture cannot be broken."""
    lines = _COMMENT.sub("", text).splitlines()
    return [x for x in lines if len(x) > MOST_COLUMNS and not x.lstrip().startswith(("|", "![", "["))]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text, without markup; code is one word."""
    for paragraph in paragraphs(text):
        yield from (part for part in _END.split(_ABBREVIATION.sub(r"\1 ", paragraph)) if part.strip())


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs, items of lists and cells of tables, without markup, each in one line."""
    text = _COMMENT.sub("", _FENCE.sub("\n", text))
    # A code span may break over a line, and may hold anything.
    text = re.sub(r"(`+)(?!`).+?\1", "Code", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        plain = line.strip()
        cells = plain.strip("|").split("|") if plain.startswith("|") else []
        begins = re.match(r"([-*+]|\d+\.|#+|>|!!!|\?\?\?|:::?) ", plain)
        if (not plain or begins or cells) and lines:
            yield " ".join(lines)
            lines = []
        if cells:
            yield from (cell.strip() for cell in cells if cell.strip(" -:"))
        elif plain:
            lines.append(re.sub(r"^([-*+]|\d+\.|#+|>) ", "", plain))
