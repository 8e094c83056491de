"""Values as text for people: coloured tables on a terminal, aligned plain lines everywhere else.

Every name that came from a file goes through `escape` here, once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from ckptguard.cli.output import escape, say
from ckptguard.values.plain_numbers import age as age
from ckptguard.values.plain_numbers import size as size

if TYPE_CHECKING:
    from ckptguard.documents.report_lines import Line
    from ckptguard.runs.results import Checked
    from ckptguard.values.verdict import Finding

COLOURS = {
    "good": "green",
    "bad": "red",
    "incomplete": "yellow",
    "suspect": "yellow",
    "pending": "cyan",
    "error": "red",
    "sickness": "yellow",
    "warning": "yellow",
    "notice": "cyan",
}
_LEAST_FOLDED = 20  # columns of the terminal


def word(text: str, width: int = 0) -> str:
    """An outcome or severity, coloured; colours vanish where the output is not a terminal."""
    return click.style(text.ljust(width), fg=COLOURS.get(text))


def cell(value: object) -> str:
    """One value of a table, escaped; "-" where it is not known."""
    return "-" if value is None or value == "" else escape(str(value))


def say_lines(lines: Iterable[Line]) -> None:
    """Lines of a report, with their outcomes and severities in colour."""
    for line in lines:
        say(f"{line.lead}{word(line.word)}{line.rest}")


def print_checked(checked: Checked) -> None:
    """One line for a checkpoint that was checked, and one for each finding."""
    from ckptguard.documents.report_lines import checked_lines  # help prints none

    say_lines(checked_lines(checked))


def print_findings(findings: Iterable[Finding], checkpoint: str) -> None:
    """A line for all findings of this checkpoint that are alike."""
    from ckptguard.documents.report_lines import finding_lines

    say_lines(finding_lines(findings, checkpoint))


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows under titles: a rich table on a terminal that is wide enough to fold the last column alone, else columns
    that pipes can cut, one row a line."""
    import shutil  # what it loads takes as long as rendering; most commands print no table

    cells = [[cell(v) for v in row] for row in rows]
    firm = sum(3 + max(map(len, column)) for column in list(zip(titles, *cells, strict=True))[:-1])
    if sys.stdout.isatty() and firm + _LEAST_FOLDED <= shutil.get_terminal_size().columns:
        _rich_table(titles, cells)
    else:
        columns(titles, rows)


def columns(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows under titles, one row a line, also on a terminal: for rows that are too wide to be folded in columns."""
    cells = [[cell(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    lines = [
        "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip()
        for row in ([t.upper() for t in titles], *cells)
    ]
    say("\n".join(lines))


def some(names: Sequence[str], most: int = 10) -> str:
    """The first of many names, and how many there are beside."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def facts(*pairs: tuple[str, object]) -> None:
    """Named values below each other."""
    width = max(len(name) for name, _ in pairs) + 2
    for name, value in pairs:
        say(f"{(name + ':').ljust(width)}{cell(value)}")


def _rich_table(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        drawn.add_column(title, overflow="fold", no_wrap=title != titles[-1])
    for row in cells:
        # Text, not markup: a name may contain brackets.
        drawn.add_row(*(Text(value, style=COLOURS.get(value, "")) for value in row))
    Console().print(drawn)
