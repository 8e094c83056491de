"""What the verbs answer with, for people: it prints what the command of its name prints, and a notebook shows that."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ckptguard.inspect import diff
from ckptguard.recover import restore, roll_back
from ckptguard.runs import good_checkpoint
from ckptguard.values import incident
from ckptguard.values.ids import escape

if TYPE_CHECKING:
    from ckptguard.documents.report_lines import Line, Table

LEFT = 'style="text-align:left"'  # notebooks put cells to the right


class Printable:
    """Prints what its command prints. `_blocks` are its lines and tables."""

    __slots__ = ()

    def _blocks(self) -> Iterable[Line | Table]:
        raise NotImplementedError

    def __str__(self) -> str:
        """The lines of the command."""
        from ckptguard.documents.report_lines import Line
        from ckptguard.terminal.columns import lay_out

        texts = ([b.text] if isinstance(b, Line) else lay_out(b.text_rows) for b in self._blocks())
        return "\n".join(itertools.chain.from_iterable(texts))

    def __repr__(self) -> str:
        """The same: who asks in a shell wants to read it."""
        return str(self)

    def _repr_html_(self) -> str:
        """The same for notebooks. Everything in it is escaped: names come from files that may be hostile."""
        return as_html(self._blocks())


class KnownGoodAnswer(Printable, good_checkpoint.KnownGood, frozen=True, kw_only=True):
    """See ``runs.good_checkpoint.KnownGood``."""

    def _blocks(self) -> Iterable[Line | Table]:
        yield _line(self.path)


class RestoreAnswer(Printable, restore.Restored, frozen=True, kw_only=True):
    """See ``recover.restore.Restored``."""

    def _blocks(self) -> Iterable[Line | Table]:
        yield _line(self.path)


class RollbackAnswer(Printable, roll_back.RolledBack, frozen=True, kw_only=True):
    """See ``recover.roll_back.RolledBack``."""

    def _blocks(self) -> Iterable[Line | Table]:
        from ckptguard.documents.done_lines import rollback_lines

        return rollback_lines(self)


class DiffAnswer(Printable, diff.Diff, frozen=True, kw_only=True):
    """See ``inspect.diff.Diff``."""

    def _blocks(self) -> Iterable[Line | Table]:
        from ckptguard.documents.diff_lines import damage_notes, diff_blocks

        return itertools.chain((_line(f"warning: {note}") for note in damage_notes(self)), diff_blocks(self))


class IncidentAnswer(Printable, incident.IncidentReport, frozen=True, kw_only=True):
    """See ``values.incident.IncidentReport``."""

    def _blocks(self) -> Iterable[Line | Table]:
        from ckptguard.documents.report_lines import Line
        from ckptguard.reporting.report_text import report_text

        return map(Line, report_text(self).rstrip("\n").split("\n"))


_Kind = TypeVar("_Kind", bound=msgspec.Struct)


def answer(kind: type[_Kind], found: msgspec.Struct, **more: Any) -> _Kind:
    """The same values as what people can print."""
    return kind(**msgspec.structs.asdict(found), **more)


def as_html(blocks: Iterable[Line | Table]) -> str:
    """Lines and tables as HTML without anybody's markup."""
    from ckptguard.documents.report_lines import Line

    parts = []
    for are_lines, group in itertools.groupby(blocks, lambda block: isinstance(block, Line)):
        if are_lines:
            text = "\n".join(block.text for block in group if isinstance(block, Line))
            parts.append(f"<pre>{html.escape(text)}</pre>")
        else:
            parts += [_table(*block.text_rows) for block in group if not isinstance(block, Line)]
    return "".join(parts)


def _table(titles: Iterable[str], *rows: Iterable[str]) -> str:
    heads = "".join(f"<th {LEFT}>{html.escape(title)}</th>" for title in titles)
    lines = ("".join(f"<td {LEFT}>{html.escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{cells}</tr>" for cells in lines)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _line(text: str) -> Line:
    from ckptguard.documents.report_lines import Line

    return Line(escape(text))
