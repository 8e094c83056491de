"""Text in columns that fit a width. Cells wrap between words, and columns that do not fit go to the next line.

There is one layout for all widths. A word is never broken: a name that is wider than its whole line loses its middle,
and "…" shows where. Without a width each row is one line, as pipes need it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Sequence

_GAP = 2  # spaces between columns, and before columns on a further line
_ROOMY = 30  # a column of long texts is this wide at least, or goes to a line of its own
_BETWEEN_NAMES = re.compile(r"(?<=[/+|])(?=\w)")
_WITHIN_NAMES = re.compile(r"(?<=[-._=:,#@~)\]])(?=\w)")
_NOTHING = ("", "-")

Style = Callable[[str], str]


def width_of(text: str) -> int:
    """The columns of a terminal that a text takes: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # only for who uses such names

    return cell_len(text)


def wrap(text: str, width: int, hang: int = 0) -> list[str]:
    """The text in lines of this width, all but the first one indented by `hang`. They break at spaces, else after the
    separators in paths and names."""
    if width_of(text) <= width:
        return [text]
    indent = min(_indent(text), width // 2)
    lines, hang = [" " * indent], min(max(hang, indent), width // 2)
    for word in text.split():
        space = " " if lines[-1].strip() else ""
        for piece in _pieces(word, width - hang):
            if width_of(lines[-1] + space + piece) > width and lines[-1].strip():
                lines.append(" " * hang + piece)
            else:
                lines[-1] += space + piece
            space = ""
    return lines


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _pieces(word: str, width: int) -> list[str]:
    """A word in pieces that may stand on lines of their own; none is wider than the width."""
    if width_of(word) <= width:
        return [word]
    parts = _BETWEEN_NAMES.split(word)
    smaller = ([part] if width_of(part) <= width else _WITHIN_NAMES.split(part) for part in parts)
    return [_without_middle(part, width) for part in itertools.chain.from_iterable(smaller) if part]


def _without_middle(text: str, width: int) -> str:
    if width_of(text) <= width:
        return text
    head, tail = "", ""
    for character in text:
        if width_of(head + character) > (width - 1) // 2:
            break
        head += character
    for character in reversed(text[len(head) :]):
        if width_of(character + tail) > width - 1 - width_of(head):
            break
        tail = character + tail
    while tail and width_of(tail[0]) == 0:  # it would combine with the mark
        tail = tail[1:]
    return f"{head}…{tail}"


def lay_out(
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    *,
    right: Collection[int] = (),
    style: Style = str,
) -> list[str]:
    """The rows as lines, of this width at most. The first one may be titles, and a row of one cell is a heading, which
    is in no column. `right` are the numbers of columns of numbers. `style` colours a whole cell."""
    groups = _groups([row for row in rows if len(row) > 1], width)
    lines: list[str] = []
    for row in rows:
        if len(row) == 1:
            lines += [row[0]] if width is None else wrap(row[0], width)
            continue
        for number, group in enumerate(groups):
            if number and all(row[column] in _NOTHING for column, _ in group):
                continue
            indent = " " * _GAP if number else ""
            lines += [indent + line for line in _lines(row, group, right, style)]
    return lines


def _groups(rows: Sequence[Sequence[str]], width: int | None) -> list[list[tuple[int, int]]]:
    """The (column, width) of each line that a row takes."""
    if not rows:
        return []
    natural = [max(width_of(row[column]) for row in rows) for column in range(len(rows[0]))]
    if width is None or _total(natural) <= width:
        return [list(enumerate(natural))]
    least = [
        min(n, max(_ROOMY, _hang(column) + max(_widest_piece(row[column]) for row in rows)))
        for column, n in enumerate(natural)
    ]
    groups: list[list[tuple[int, int]]] = []
    first = 0
    while first < len(natural):
        room = width - (_GAP if groups else 0)
        end = first + 1
        while end < len(natural) and _total(least[first : end + 1]) <= room:
            end += 1
        widths = _shared_out(natural[first:end], least[first:end], room)
        group = list(zip(range(first, end), widths, strict=True))
        used = [max(width_of(line) for row in rows for line in _wrapped(row, *one)) for one in group]
        used[-1] = min(natural[end - 1], used[-1] + sum(widths) - sum(used))  # what others leave
        groups.append(list(zip(range(first, end), used, strict=True)))
        first = end
    return groups


def _shared_out(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return the width of each column. The widest ones shrink first, and none below its least."""
    for level in range(max(natural), 0, -1):
        widths = [max(low, min(n, level)) for low, n in zip(least, natural, strict=True)]
        if _total(widths) <= room:
            return widths
    return [min(low, room) for low in least]


def _wrapped(row: Sequence[str], column: int, width: int) -> list[str]:
    return wrap(row[column], width, _hang(column))


def _hang(column: int) -> int:
    """How far a cell's further lines are indented: those of the first column would look like another row."""
    return 0 if column else _GAP


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _widest_piece(cell: str) -> int:
    pieces = (piece for word in cell.split() for piece in _BETWEEN_NAMES.split(word))
    return _indent(cell) + max(map(width_of, pieces), default=0)


def _lines(row: Sequence[str], group: Sequence[tuple[int, int]], right: Collection[int], style: Style) -> list[str]:
    wrapped = [_wrapped(row, column, width) for column, width in group]
    lines = []
    for parts in itertools.zip_longest(*wrapped, fillvalue=""):
        line, end = "", 0  # `end`: without the spaces that only pad
        for part, (column, width) in zip(parts, group, strict=True):
            pad = " " * (width - width_of(part))
            shown = style(part) if part == row[column] else part
            line += pad + shown if column in right else shown
            end = len(line) if part else end
            line += " " * _GAP if column in right else pad + " " * _GAP
        lines.append(line[:end])
    return lines
