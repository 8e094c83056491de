"""An incident's report as plain text, for terminals and mails. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from ckptguard.formats.dtypes import FP16_LIMIT
from ckptguard.incidents.report_words import (
    change_line,
    changes_title,
    evidence_pairs,
    known_facts,
    loss_note,
    next_commands,
    onset_note,
    onset_words,
    outcome,
    share_of_fp16,
    shown,
    tensor_line,
    tensors_title,
    title,
    when,
)
from ckptguard.values.ids import escape
from ckptguard.values.incident import IncidentReport, Sample

_WIDTH = 100
_LAST_SAMPLES = 12
_MOST_ROWS = 12


def report_text(report: IncidentReport) -> str:
    """The report in lines of at most some 100 characters; names from files are escaped."""
    parts = [
        _head(report),
        _causes(report),
        _samples(report),
        _tensors(report),
        _changes(report),
        _headroom(report),
        _pairs("How training computed", known_facts(report)),
        _pairs("What was noted", evidence_pairs(report)),
        _section("What was done", [f"  - {escape(action)}" for action in report.actions]),
        _section("Next", [f"  {escape(command)}\n      {why}" for command, why in next_commands(report)]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: IncidentReport) -> str:
    good, note = report.details.last_good, onset_note(report)
    return "\n".join(
        [
            escape(title(report)),
            "=" * min(len(title(report)), _WIDTH),
            *_wrapped(report.reason, ""),
            *_wrapped(f"{report.state}: {outcome(report)}", ""),
            "",
            f"run:        {escape(report.run)}",
            f"incident:   {escape(report.id)}, {escape(when(report.opened_at))}, noticed by {escape(report.source)}",
            f"onset:      {onset_words(report)} (noticed at step {shown(report.step)})",
            *([f"            {note}"] if note else []),
            *([f"known-good: {escape(shown(report.known_good))}"] if report.known_good or good is None else []),
            *([f"last good:  {escape(good.path)} ({escape(shown(good.id))})"] if good is not None else []),
        ]
    )


def _causes(report: IncidentReport) -> str:
    lines: list[str] = []
    for place, cause in enumerate(report.details.causes, 1):
        lines.append(f"  {place}. {escape(cause.title)} ({escape(cause.confidence)})")
        for reason in cause.because:
            lines += _wrapped(f"because {reason}", "     ")
        for advice in cause.advice:
            lines += _wrapped(f"-> {advice}", "     ")
    return _section("Likely causes", lines)


def _samples(report: IncidentReport) -> str:
    samples, gap = _around(report)
    if not samples:
        return ""
    columns = [("step", [str(s.step) for s in samples])]
    for name, values in (
        ("loss", [s.loss for s in samples]),
        ("gradient norm", [s.grad_norm for s in samples]),
        ("loss scale", [s.scale for s in samples]),
        ("learning rate", [s.lr for s in samples]),
    ):
        if any(v is not None for v in values):
            columns.append((name, [shown(v) for v in values]))
    widths = [max(len(name), *map(len, cells)) for name, cells in columns]
    header = "  " + "  ".join(name.rjust(width) for (name, _), width in zip(columns, widths, strict=True))
    rows = [
        "  " + "  ".join(cells[n].rjust(width) for (_, cells), width in zip(columns, widths, strict=True))
        for n in range(len(samples))
    ]
    mark = "  <- onset, at the earliest" if onset_note(report) else "  <- onset"
    marked = [row + (mark if sample.step == report.onset else "") for row, sample in zip(rows, samples, strict=True)]
    if gap:
        marked.insert(gap, "  ...")
    note = loss_note(report)
    return _section("The last updates", [header, *marked, *([f"  {note}"] if note else [])])


def _around(report: IncidentReport) -> tuple[tuple[Sample, ...], int]:
    """The last updates; where the onset lies further back, those around it and the very last ones, and how many come
    before the gap between them."""
    samples = report.details.samples
    onset = next((n for n, s in enumerate(samples) if s.step == report.onset), len(samples))
    if onset >= len(samples) - _LAST_SAMPLES:
        return samples[-_LAST_SAMPLES:], 0
    near = samples[max(0, onset - _LAST_SAMPLES // 2) : onset + _LAST_SAMPLES // 3]
    return near + samples[-2:], len(near)


def _tensors(report: IncidentReport) -> str:
    tensors, details = report.details.tensors, report.details
    lines = [f"  {escape(t.kind):9}  {escape(t.name)}: {escape(tensor_line(t))}" for t in tensors[:_MOST_ROWS]]
    left = len(tensors) - len(lines) + details.tensors_omitted
    return _section(f"{tensors_title(report)}, what went first at the top", lines + _left(left))


def _changes(report: IncidentReport) -> str:
    name, details = changes_title(report), report.details
    if name is None:
        return ""
    rows = [
        (
            change_line(c),
            shown(c.largest),
            share_of_fp16(c.largest),
            c.name if c.role == "model" else f"{c.name} ({c.role})",
        )
        for c in details.changes[:_MOST_ROWS]
    ]
    table = [("change", "largest before", "of fp16", "tensor"), *((escape(a), b, c, escape(d)) for a, b, c, d in rows)]
    first, second, third = (max(len(row[n]) for row in table) for n in range(3))
    lines = [f"  {a.ljust(first)}  {b.rjust(second)}  {c.rjust(third)}  {d}" for a, b, c, d in table]
    left = _left(len(details.changes) - len(rows) + details.changes_omitted)
    note = _wrapped(details.changes_note, "  ") if details.changes_note is not None else []
    return _section(name, [*(lines if rows else []), *left, *note])


def _headroom(report: IncidentReport) -> str:
    good = report.details.last_good
    if good is None or not good.largest:
        return ""
    lines = [
        f"  {m.largest / FP16_LIMIT:8.2%}  {m.largest:<12.6g} {escape(m.tensor)}" for m in good.largest[:_MOST_ROWS]
    ]
    left = len(good.largest) - len(lines)
    return _section(f"Largest magnitudes of {good.path}, and their share of fp16's 65504", lines + _left(left))


def _pairs(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    found = list(pairs)
    width = max((len(n) for n, _ in found), default=0) + 1
    return _section(name, [f"  {(escape(n) + ':').ljust(width)} {escape(value)}" for n, value in found])


def _section(name: str, lines: list[str]) -> str:
    return "\n".join([escape(name), "-" * min(len(name), _WIDTH), *lines]) if lines else ""


def _left(count: int) -> list[str]:
    return [f"  ... and {count} more"] if count > 0 else []


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        escape(text), _WIDTH, initial_indent=indent, subsequent_indent=indent + "   ", break_on_hyphens=False
    )
