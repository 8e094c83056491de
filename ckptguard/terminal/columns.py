"""Text in columns that fit a width: what is too long goes on in further lines, and nothing is left out.

Without a width each row is one line, as pipes need it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

_GAP = 2  # spaces between columns, and before further lines
_LEAST = 20  # a column that goes on in further lines is this wide at least
_NOTHING = ("", "-")

Style = Callable[[str], str]


def width_of(text: str) -> int:
    """The columns of a terminal that a text takes: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # only for who uses such names

    return cell_len(text)


def wrap(text: str, width: int, hang: int = 0) -> list[str]:
    """The text in lines of this width, all but the first one indented by `hang`. They break at spaces, and within what
    is wider than a line."""
    if width_of(text) <= width:
        return [text]
    from rich.console import Console  # only for what does not fit
    from rich.text import Text

    indent = min(len(text) - len(text.lstrip(" ")), width // 2)
    hang = min(max(hang, indent), width // 2)
    first, *rest = (line.plain.strip() for line in Text(text.strip(" ")).wrap(Console(), width - hang))
    return [" " * indent + first, *(" " * hang + line for line in rest)]


def lay_out(
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    *,
    right: Collection[int] = (),
    style: Style = str,
) -> list[str]:
    """The rows as lines, of this width at most. With more than two columns the first one has the titles. A row of one
    cell is a heading, which is in no column.

    `right` are the numbers of columns of numbers. `style` colours a whole cell. If the columns do not fit, the widest
    one goes on in further lines. If that does not do, each cell has its own line.
    """
    widths = [max(map(width_of, column)) for column in zip(*(row for row in rows if len(row) > 1), strict=True)]
    excess = 0 if width is None else max(sum(widths) + _GAP * (len(widths) - 1) - width, 0)
    widest = widths.index(max(widths)) if widths else 0
    if width is not None and excess and len(widths) > 2 and widths[widest] - excess < _LEAST:
        return _each_alone(rows, width, style)
    if excess:
        widths[widest] = max(widths[widest] - excess, 2)
    lines: list[str] = []
    for row in rows:
        if len(row) == 1:
            lines += row if width is None else wrap(row[0], width)
            continue
        # Further lines of the first column are indented: they would look like another row.
        cells = [
            wrap(cell, wide, 0 if place else _GAP) for place, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            line = ""
            for place, (part, wide) in enumerate(zip(parts, widths, strict=True)):
                shown, pad = style(part) if part == row[place] else part, " " * (wide - width_of(part))
                line += (pad + shown if place in right else shown + pad) + " " * _GAP
            lines.append(line.rstrip(" "))
    return lines


def _each_alone(rows: Sequence[Sequence[str]], width: int, style: Style) -> list[str]:
    """Each row as its first cell, and below it a line for each other one that says something, after its title."""
    titles, lines = rows[0], list[str]()
    for row in rows[1:]:
        lines += wrap(row[0], width, _GAP)
        for title, cell in zip(titles[1:], row[1:], strict=False):
            lead = f"{' ' * _GAP}{title}: "
            if cell not in _NOTHING:
                fits = width_of(lead + cell) <= width
                lines += [lead + style(cell)] if fits else wrap(lead + cell, width, 2 * _GAP)
    return lines
