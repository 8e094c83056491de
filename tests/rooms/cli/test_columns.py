"""Columns: at any width no line is too long, and no word of a cell is broken."""

from __future__ import annotations

import re
import unicodedata

import click
from hypothesis import example, given
from hypothesis import strategies as st

from ckptguard.terminal.columns import lay_out, wrap
from ckptguard.terminal.output import escape

# Letters, wide and combining characters, what names are made of, and what `escape` makes of control characters.
NAMES = st.text("ab9é漢字e\u0301\u0323/.-_+ \x1b\n\u202e…", max_size=60).map(escape)
ROWS = st.integers(1, 6).flatmap(
    lambda count: st.lists(st.lists(NAMES, min_size=count, max_size=count), min_size=1, max_size=5)
)
WIDTHS = st.integers(40, 200)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def columns_of(text: str) -> int:
    """The columns that a terminal needs, told without the library that the layout asks."""
    widths = (0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
    return sum(widths)


def words_of(text: str) -> list[str]:
    """What must not be broken: letters, digits, and what combines with them."""
    return re.findall(r"(?:[^\W_]|[\u0300-\u036f])+", text)


def pieces_of(line: str) -> list[str]:
    return line.split()


@given(ROWS, WIDTHS)
@example([["x" * 300, "good"], ["漢" * 90, "bad"]], 40)
def test_no_line_is_wider_than_asked(rows: list[list[str]], width: int) -> None:
    """Whatever the names, and however they are coloured."""
    for lines in (
        lay_out(rows, width),
        lay_out(rows, width, right=(1, 2), style=lambda text: click.style(text, "red")),
    ):
        assert all(columns_of(COLOUR.sub("", line)) <= width for line in lines)


@given(ROWS, WIDTHS)
def test_no_word_is_broken(rows: list[list[str]], width: int) -> None:
    """Each word of a cell stands in one line, or what is left of it has a mark where its middle was."""
    shown = "\n".join(lay_out(rows, width))
    whole = words_of(shown)
    for cell in (cell for row in rows for cell in row):
        if cell in ("", "-"):
            continue
        for word in words_of(cell):
            cut = any(columns_of(piece) + 2 >= width - 2 for piece in pieces_of(cell))
            assert word in whole or (cut and "…" in shown), (word, shown)


@given(ROWS)
def test_without_a_width_a_row_is_a_line(rows: list[list[str]]) -> None:
    """As pipes need it: nothing is wrapped and nothing is lost."""
    lines = lay_out(rows)
    assert len(lines) == (len(rows) if rows[0] else 0)
    for row, line in zip(rows, lines, strict=True):
        assert all(cell.rstrip() in line for cell in row)


@given(NAMES, WIDTHS, st.integers(0, 8))
def test_wrapped_text_says_the_same(text: str, width: int, hang: int) -> None:
    """Only spaces come and go, unless a name is wider than a line."""
    lines = wrap(text, width, hang)
    if "…" in text or "…" not in "".join(lines):
        assert "".join("".join(lines).split()) == "".join(text.split())


def test_what_a_wide_table_looks_like_when_it_is_narrow() -> None:
    """The last column goes to a line of its own, under its title, and is not there where it says nothing."""
    rows = [
        ["PATH", "OUTCOME", "REASON"],
        ["net-1.pt", "good", "-"],
        ["net-2.pt", "bad", "the bytes of this tensor are not those that were sealed"],
    ]
    assert lay_out(rows, 80) == [
        "PATH      OUTCOME  REASON",
        "net-1.pt  good     -",
        "net-2.pt  bad      the bytes of this tensor are not those that were sealed",
    ]
    assert lay_out(rows, 44) == [
        "PATH      OUTCOME",
        "  REASON",
        "net-1.pt  good",
        "net-2.pt  bad",
        "  the bytes of this tensor are not those",
        "  that were sealed",
    ]


def test_long_paths_break_at_separators() -> None:
    """Further lines of a path are indented, so that they do not look like another row."""
    lines = lay_out([["outputs/2026-01-31/run-7/checkpoints/checkpoint-500", "good"]], 46)
    assert lines == ["outputs/2026-01-31/run-7/checkpoints/  good", "  checkpoint-500"]


def test_a_name_wider_than_a_line_loses_its_middle() -> None:
    """Its beginning and its end are what tells it from others, and a mark says that something is missing."""
    [line, _] = lay_out([["a" * 60 + "z" * 60, "good"]], 40)
    assert line.startswith("aaa")
    assert line.endswith("zzz")
    assert "…" in line
