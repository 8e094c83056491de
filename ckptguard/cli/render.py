"""Values as text for people: coloured tables on a terminal, aligned plain lines everywhere else.

Every name that came from a file goes through `escape` here, once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from ckptguard.cli.output import escape, say

if TYPE_CHECKING:
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
_NUMBERS = re.compile(r"[\d.]*\d")


def size(count: int | None) -> str:
    """Bytes as people read them."""
    if count is None:
        return "-"
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def age(seconds: float | None) -> str:
    """A span of time as people read it."""
    if seconds is None:
        return "-"
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def word(text: str, width: int = 0) -> str:
    """An outcome or severity, coloured; colours vanish where the output is not a terminal."""
    return click.style(text.ljust(width), fg=COLOURS.get(text))


def cell(value: object) -> str:
    """One value of a table, escaped; "-" where it is not known."""
    return "-" if value is None or value == "" else escape(str(value))


def print_findings(findings: Iterable[Finding], checkpoint: str) -> None:
    """A line for all findings that are equal but for where they are and their numbers: how heavy, about what in the
    checkpoint of this path, what."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        about = "tensor" if finding.tensor else "file" if finding.file else finding.message
        key = (finding.severity.value, finding.check, about, _NUMBERS.sub("#", finding.message))
        alike.setdefault(key, []).append(finding)
    for (severity, check, *_), group in alike.items():
        say(f"  {word(severity)} [{escape(check)}] {_words(group, checkpoint)}")


def _words(group: Sequence[Finding], checkpoint: str) -> str:
    """What is said of findings that are alike: by the first of them, tensors before files."""
    message = group[0].message
    tensors, files = (
        list(dict.fromkeys(filter(None, names))) for names in zip(*((f.tensor, f.file) for f in group), strict=True)
    )
    files = [file.removeprefix(f"{checkpoint}/") for file in files]
    about = tensors or files
    lead = f"{_first_of(about)}: " if about and not (len(group) == 1 and about[0] in message) else ""
    more = f" (and {len(group) - 1} more like it)" if len(about) < 2 < 1 + len(group) else ""
    named = bool(tensors and files) and not (len(files) == 1 and files[0] in (message, checkpoint))
    where = f" ({_first_of(files, 'file')})" if named else ""
    return f"{lead}{escape(message)}{more}{where}"


def _first_of(names: Sequence[str], noun: str = "") -> str:
    rest = len(names) - 1
    noun = f" {noun}{'s' * (rest > 1)}" if noun else ""
    return escape(names[0]) + (f" and {rest} more{noun}" if rest else "")


def print_checked(checked: Checked, *, notices: bool = True) -> None:
    """One line for a checkpoint that was checked, and one for each finding; notices may only be counted."""
    shown = f" ({checked.id})" if checked.id else ""
    quiet = [f for f in checked.findings if f.severity.value == "notice" and not notices]
    counted = f", {len(quiet)} notice{'s' * (len(quiet) > 1)}" if quiet else ""
    say(f"{word(checked.outcome.value, 10)} {cell(checked.path)}{shown}  {size(checked.bytes)}{counted}")
    print_findings((f for f in checked.findings if f not in quiet), checked.path)


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
