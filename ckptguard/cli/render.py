"""Values as text for people: in colours and within the width of a terminal, one row a line everywhere else.

Every name that came from a file goes through `escape` here, once.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from ckptguard.terminal.columns import lay_out, wrap
from ckptguard.terminal.output import escape, say, trouble, warn
from ckptguard.values.plain_numbers import age as age
from ckptguard.values.plain_numbers import size as size

if TYPE_CHECKING:
    from ckptguard.documents.report_lines import Line, Table
    from ckptguard.runs.not_understood import NotUnderstood
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
    "yes": "green",
    "partly": "yellow",
    "no": "red",
}
_HANG = 2


def word(text: str, width: int = 0) -> str:
    """An outcome or severity, coloured; `say` takes the colours out where the output has none."""
    return click.style(text.ljust(width), fg=COLOURS.get(text))


def cell(value: object) -> str:
    """One value of a table, escaped; "-" where it is not known."""
    return "-" if value is None or value == "" else escape(str(value))


def say_lines(lines: Iterable[Line]) -> None:
    """Lines of a report, with their outcomes and severities in colour. Those that are too long are indented further."""
    for line in lines:
        first, *rest = _fitted(line.text, hang=(len(line.lead) if line.word else 0) + _HANG)
        if line.word:  # else the lead is the whole line, and may be folded
            first = line.lead + word(line.word) + first[len(line.lead + line.word) :]
        say("\n".join([first, *rest]))


def say_blocks(blocks: Iterable[Line | Table]) -> None:
    """Lines and tables of a report, in their order."""
    from ckptguard.documents.report_lines import Table

    for block in blocks:
        if isinstance(block, Table):
            table(*block)
        else:
            say_lines([block])


def say_text(text: str) -> None:
    """Lines that may hold names from a file. Those that are too long are indented further."""
    lines = (escape(line) for line in text.split("\n"))
    say("\n".join(part for line in lines for part in _fitted(line, hang=len(line) - len(line.lstrip()) + _HANG)))


def print_checked(checked: Checked) -> None:
    """One line for a checkpoint that was checked, and one for each finding."""
    from ckptguard.documents.report_lines import checked_lines  # help prints none

    say_lines(checked_lines(checked))


def print_findings(findings: Iterable[Finding], checkpoint: str) -> None:
    """A line for all findings of this checkpoint that are alike."""
    from ckptguard.documents.report_lines import finding_lines

    say_lines(finding_lines(findings, checkpoint))


def table(
    titles: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Collection[str] = (),
    optional: Collection[str] = (),
) -> None:
    """Rows under titles, within the width of a terminal. `right` are the titles of columns of numbers. Of `optional`
    columns only those are shown in which a row has a value."""
    from ckptguard.documents.report_lines import Table

    known = {number for row in rows for number, value in enumerate(row) if value is not None and value != ""}
    left_out = {number for number, title in enumerate(titles) if title in optional and number not in known}
    heads, *cells = ([v for number, v in enumerate(row) if number not in left_out] for row in (titles, *rows))
    aligned = [number for number, title in enumerate(heads) if title in right]
    shown = Table([str(title) for title in heads], cells).text_rows
    say("\n".join(lay_out(shown, _terminal_width(), right=aligned, style=_coloured)))


def _coloured(text: str) -> str:
    return click.style(text, fg=COLOURS[text]) if text in COLOURS else text


def _terminal_width() -> int | None:
    """The columns of the terminal that we write to; None for a pipe or a file, whose readers want one row a line."""
    if not sys.stdout.isatty():
        return None
    import shutil  # what it loads takes as long as rendering; most commands print no table

    return shutil.get_terminal_size().columns


def _fitted(line: str, *, hang: int) -> list[str]:
    width = _terminal_width()
    return [line] if width is None else wrap(line, width, hang)


def some(names: Sequence[str], most: int = 10) -> str:
    """The first of many names, and how many there are beside."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def warn_not_understood(found: NotUnderstood) -> None:
    """Say which files nothing verifies, and what to do."""
    sentence, hint = found.notes
    warn(sentence)
    trouble(f"hint: {hint}")


def facts(*pairs: tuple[str, object]) -> None:
    """Named values below each other; what is not known has no line."""
    rows = [(f"{name}:", escape(str(value))) for name, value in pairs if value not in (None, "", ())]
    say("\n".join(lay_out(rows, _terminal_width())))
