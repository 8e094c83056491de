"""Columns: at any width no line is too long, and nothing that a cell says is left out."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

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


def said(*texts: str) -> Counter[str]:
    """How often each character is said, but for spaces."""
    return Counter(character for text in texts for character in "".join(text.split()))


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
def test_nothing_is_left_out(rows: list[list[str]], width: int) -> None:
    """Each character of each cell below the titles is there, but for a dash that stands for nothing."""
    shown = said(*lay_out(rows, width))
    assert said(*(cell for row in rows[1:] for cell in row if cell != "-")) - shown == Counter()


@given(ROWS)
def test_without_a_width_a_row_is_a_line(rows: list[list[str]]) -> None:
    """As pipes need it: nothing is wrapped and nothing is lost."""
    lines = lay_out(rows)
    assert len(lines) == (len(rows) if rows[0] else 0)
    for row, line in zip(rows, lines, strict=True):
        assert all(cell.rstrip() in line for cell in row)


@given(NAMES, WIDTHS, st.integers(0, 8))
def test_wrapped_text_says_the_same(text: str, width: int, hang: int) -> None:
    """Only spaces come and go."""
    assert "".join("".join(wrap(text, width, hang)).split()) == "".join(text.split())


ROWS_OF_A_RUN = [
    ["PATH", "OUTCOME", "REASON"],
    ["net-1.pt", "good", "-"],
    ["net-2.pt", "bad", "the bytes of this tensor are not those that were sealed"],
]


def test_the_widest_column_goes_on_in_further_lines() -> None:
    """The others stay as they are."""
    assert lay_out(ROWS_OF_A_RUN, 80) == [
        "PATH      OUTCOME  REASON",
        "net-1.pt  good     -",
        "net-2.pt  bad      the bytes of this tensor are not those that were sealed",
    ]
    assert lay_out(ROWS_OF_A_RUN, 50) == [
        "PATH      OUTCOME  REASON",
        "net-1.pt  good     -",
        "net-2.pt  bad      the bytes of this tensor are",
        "                   not those that were sealed",
    ]


def test_where_that_does_not_do_each_cell_has_its_own_line() -> None:
    """After its title, and not where it says nothing."""
    assert lay_out(ROWS_OF_A_RUN, 36) == [
        "net-1.pt",
        "  OUTCOME: good",
        "net-2.pt",
        "  OUTCOME: bad",
        "  REASON: the bytes of this tensor",
        "    are not those that were sealed",
    ]


def test_further_lines_of_a_first_cell_are_indented() -> None:
    """So they do not look like another row."""
    lines = lay_out([["outputs/2026-01-31/run-7/checkpoints/checkpoint-500", "good"]], 46)
    assert lines[0].endswith("  good")
    assert lines[1].startswith("  ")
    assert said(*lines) == said("outputs/2026-01-31/run-7/checkpoints/checkpoint-500", "good")
