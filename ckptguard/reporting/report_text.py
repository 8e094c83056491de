"""An incident's report as plain text, for terminals and mails. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ckptguard.reporting import report_words as words
from ckptguard.values.ids import escape
from ckptguard.values.incident import IncidentReport, Sample

_WIDTH = 80
_WIDEST = 44  # characters that a column is aligned to
_LAST_SAMPLES = 12
_NUMBERS = ("largest", "largest before", "of fp16")  # titles of columns
_COLUMNS = {"step": "step", "loss": "loss", "gradient norm": "grad_norm", "loss scale": "scale", "learning rate": "lr"}


def report_text(report: IncidentReport) -> str:
    """The report in lines of at most 80 characters, but for long names; names from files are escaped."""
    parts = [
        "\n".join(_head(report)),
        _section("Likely causes", _causes(report)),
        _section("The last updates", _samples(report)),
        *(_section(table.name, _table(table)) for table in words.tables(report)),
        _pairs("Training configuration", words.known_facts(report)),
        _pairs("Evidence", words.evidence_pairs(report)),
        _section("What was done", [f"  - {escape(action)}" for action in report.actions]),
        _section("Next", [f"  {escape(command)}\n      {why}" for command, why in words.next_commands(report)]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: IncidentReport) -> list[str]:
    title = words.title(report)
    moment, by = words.when(report.opened_at), words.noticed_by(report)
    facts = (
        ("run", report.run),
        ("incident", f"{report.id}, {moment}"),
        ("onset", words.onset_words(report)),
        ("", words.onset_note(report)),
        ("noticed", ", ".join(said for said in (words.noticed_words(report), f"by {by}") if said)),
        ("last good", words.last_good(report) or "no good checkpoint is known"),
    )
    return [
        escape(title),
        "=" * min(len(title), _WIDTH),
        *_wrapped(report.reason, ""),
        *_wrapped(f"{report.state}: {words.outcome(report)}", ""),
        "",
        *(f"{f'{name}:' if name else '':<11}{escape(value)}" for name, value in facts if value),
    ]


def _causes(report: IncidentReport) -> list[str]:
    lines: list[str] = []
    for place, cause in enumerate(report.details.causes, 1):
        lines.append(f"  {place}. {escape(cause.title)} ({escape(cause.confidence)})")
        for said in (*(f"because {reason}" for reason in cause.because), *(f"-> {advice}" for advice in cause.advice)):
            lines += _wrapped(said, "     ")
    return lines


def _samples(report: IncidentReport) -> list[str]:
    samples, gap = _around(report)
    if not samples:
        return []
    reported = {name: field for name, field in _COLUMNS.items() if any(getattr(s, field) is not None for s in samples)}
    cells = [[words.shown(getattr(sample, field)) for field in reported.values()] for sample in samples]
    header, *rows = _aligned([list(reported), *cells], [">"] * len(reported))
    marked = [row + _mark(sample.step, report) for row, sample in zip(rows, samples, strict=True)]
    if gap:
        marked.insert(gap, "  ...")
    note = words.loss_note(report)
    return [header, *marked, *_wrapped(note or "", "  ")]


def _mark(step: int, report: IncidentReport) -> str:
    if step not in (report.details.onset, report.onset_last) or words.onset_words(report) is None:
        return ""
    if not words.is_range(report):
        return "  <- onset"
    return "  <- onset, at the earliest" if step == report.details.onset else "  <- onset, at the latest"


def _around(report: IncidentReport) -> tuple[tuple[Sample, ...], int]:
    """Return the last updates, and how many of them come before a gap. If the onset lies further back, return those
    around it and the very last ones."""
    samples = report.details.samples
    onset = next((n for n, s in enumerate(samples) if s.step == report.onset), len(samples))
    if onset >= len(samples) - _LAST_SAMPLES:
        return samples[-_LAST_SAMPLES:], 0
    near = samples[max(0, onset - _LAST_SAMPLES // 2) : onset + _LAST_SAMPLES // 3]
    return near + samples[-2:], len(near)


def _table(table: words.ReportTable) -> list[str]:
    """The rows with their names at the end, because these may be long."""
    cells = [table.titles, *(tuple(map(escape, row.cells)) for row in table.rows)]
    lines = _aligned(cells, [">" if title in _NUMBERS else "<" for title in table.titles]) if table.rows else []
    left = [f"  ... and {table.omitted} more"] if table.omitted > 0 else []
    return [*_wrapped(table.note, ""), *lines, *left, *_wrapped(table.warning or "", "  ")]


def _aligned(rows: Sequence[Sequence[str]], sides: Sequence[str]) -> list[str]:
    """Rows as lines with aligned columns; `sides` holds "<" or ">" for each column."""
    widths = [min(_WIDEST, max(map(len, column))) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True)) for row in rows)
    return [f"  {line}".rstrip() for line in lines]


def _pairs(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    width = max((len(n) for n, _ in pairs), default=0) + 1
    return _section(name, [f"  {(escape(n) + ':').ljust(width)} {escape(value)}" for n, value in pairs])


def _section(name: str, lines: Sequence[str]) -> str:
    return "\n".join([escape(name), "-" * min(len(name), _WIDTH), *lines]) if lines else ""


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        escape(text),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "   ",
        break_on_hyphens=False,
        break_long_words=False,
    )
