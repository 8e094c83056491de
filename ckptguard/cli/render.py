"""Values as text for people: in colours and within the width of a terminal, one row a line everywhere else.

Every name that came from a file goes through `escape` here, once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from ckptguard.cli.columns import lay_out, wrap
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
    "yes": "green",
    "partly": "yellow",
    "no": "red",
}
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
        first, *rest = _fitted(f"  {severity} [{escape(check)}] {_words(group, checkpoint)}", hang=4)
        say("\n".join([first.replace(severity, word(severity), 1), *rest]))


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


def table(titles: Sequence[str], rows: Sequence[Sequence[object]], *, right: Collection[int] = ()) -> None:
    """Rows under titles, within the width of a terminal. `right` are the numbers of columns of numbers."""
    cells = [[cell(value) for value in row] for row in rows]
    heads = [[title.upper() for title in titles]] if titles else []
    say("\n".join(lay_out([*heads, *cells], _terminal_width(), right=right, style=_coloured)))


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


def facts(*pairs: tuple[str, object]) -> None:
    """Named values below each other; what is not known has no line."""
    rows = [(f"{name}:", escape(str(value))) for name, value in pairs if value is not None and value != ""]
    say("\n".join(lay_out(rows, _terminal_width())))
