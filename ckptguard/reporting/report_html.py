"""An incident's report as one HTML page that needs nothing but itself: no script, no font, no image from elsewhere.

Pure, but for the style sheet beside it. Everything that is not ours goes through `_text`.
"""

from __future__ import annotations

import html
import importlib.resources
import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ckptguard.reporting import report_words as words
from ckptguard.values.ids import escape
from ckptguard.values.incident import IncidentReport, number
from ckptguard.version import __version__

WIDTH, HEIGHT = 720, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 16, 24
_MOST_POINTS = 1000
_LARGEST = 1e300  # differences of what is drawn stay finite
# title, field of a sample, whether on a logarithmic scale
_CURVES = (
    ("Loss", "loss", True),
    ("Gradient norm", "grad_norm", True),
    ("Loss scale", "scale", True),
    ("Learning rate", "lr", False),
)


def report_html(report: IncidentReport) -> str:
    """The whole page."""
    heading = _text(words.title(report))
    style = importlib.resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    commands = (
        f'<p class="command"><code>{_text(c)}</code> {_text(why)}</p>' for c, why in words.next_commands(report)
    )
    body = "".join(
        [
            _head(report, heading),
            _tiles(report),
            _section("Likely causes", _causes(report)),
            _section("The last updates", _curves(report)),
            *(_section(table.name, _table(table)) for table in words.tables(report)),
            _section("Training configuration", _pairs("facts", words.known_facts(report))),
            _section("Evidence", _pairs("facts", words.evidence_pairs(report))),
            _section("What was done", f'<ol class="done">{_items(report.actions)}</ol>' if report.actions else ""),
            _section("Next", "".join(commands)),
            f"<footer>Incident {_text(report.id)} &middot; ckptguard {_text(__version__)}</footer>",
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{heading}</title><style>\n{style}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(escape(str(value)), quote=True)


def _section(name: str, content: str) -> str:
    return f"<section><h2>{name}</h2>{content}</section>" if content else ""


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{_text(line)}</li>" for line in lines)


def _pairs(rank: str, pairs: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<div><dt>{_text(key)}</dt><dd>{_text(value)}</dd></div>" for key, value in pairs)
    return f'<dl class="{rank}">{cells}</dl>' if cells else ""


def _note(text: str | None) -> str:
    return f'<p class="note">{_text(text)}</p>' if text is not None else ""


def _table(table: words.ReportTable) -> str:
    """The rows with their names at the beginning, and with their bars."""
    name, titles = table.titles[-1], "".join(f"<th>{title}</th>" for title in table.titles[:-1])
    rows = "".join(_row(row) for row in table.rows)
    whole = f'<div class="wide"><table><thead><tr><th>{name}</th>{titles}</tr></thead>{rows}</table></div>'
    more = _note(f"and {table.omitted} more" if table.omitted > 0 else None)
    return _note(table.note) + (whole if rows else "") + more + _note(table.warning)


def _row(row: words.ReportRow) -> str:
    *cells, name = (_text(cell) for cell in row.cells)
    bar = f'<td class="bar"><i style="width:{100 * row.bar:.1f}%"></i></td>' if row.bar is not None else ""
    inside = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr class="{row.mark}"><td><code>{name}</code></td>{inside}{bar}</tr>'


def _head(report: IncidentReport, heading: str) -> str:
    state = report.state if report.state in ("open", "handling", "closed") else "open"
    repaired = state == "closed" and (report.known_good is not None or report.cause in words.NO_SICKNESS)
    return (
        f'<header class="{"repaired" if repaired else state}">'
        f'<p class="over"><span class="pill {state}">{_text(report.state)}</span> '
        f"{_text(words.when(report.opened_at))} &middot; noticed by {_text(words.noticed_by(report))}</p>"
        f'<h1>{heading}</h1><p class="lead">{_text(report.reason)}</p>'
        f'<p class="outcome">{_text(words.outcome(report))}</p>'
        f'<p class="run"><code>{_text(report.run)}</code></p></header>'
    )


def _tiles(report: IncidentReport) -> str:
    good, causes, onset = report.details.last_good, report.details.causes, words.onset_words(report)
    noticed, _, later = words.noticed_words(report).partition(", ")
    back = words.last_good(report) or "none is known"
    step = f"step {good.step}" if good is not None and good.step is not None else ""
    exactly = "the first update under suspicion" if report.details.onset is not None else "nothing shows when exactly"
    tiles = [
        ("Onset", onset, words.onset_note(report) or exactly),
        ("Noticed", noticed, later),
        ("Last good", good.path if good is not None and step else back, step),
        *([("Most likely" if causes[0].confidence == "likely" else "Possibly", causes[0].title, "")] if causes else []),
    ]
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{_text(value)}<small>{_text(note)}</small></dd></div>"
        for name, value, note in tiles
        if value
    )
    return f'<dl class="tiles">{cells}</dl>'


def _causes(report: IncidentReport) -> str:
    parts: list[str] = []
    for cause in report.details.causes:
        rank = "likely" if cause.confidence == "likely" else "possible"
        head = f'<h3>{_text(cause.title)} <span class="pill {rank}">{_text(cause.confidence)}</span></h3>'
        body = (
            f'<ul class="because">{_items(cause.because)}</ul><p class="do">What to do</p>'
            f'<ol class="advice">{_items(cause.advice)}</ol>'
        )
        if not parts:
            parts.append(f'<article class="cause first {rank}">{head}{body}</article>')
        else:
            parts.append(f'<details class="cause {rank}"><summary>{head}</summary>{body}</details>')
    return "".join(parts)


def _curves(report: IncidentReport) -> str:
    samples, good = report.details.samples, report.details.last_good
    if not samples:
        return ""
    last_good = good.step if good is not None else None
    axis = Axis((samples[0].step, samples[-1].step), report.details.onset, report.details.onset_through, last_good)
    marks = (("onset", "onset", axis.onset), ("good", "last good checkpoint", axis.good))
    keys = [f'<span class="k {kind}">{name}</span>' for kind, name, step in marks if axis.shows(step)]
    parts = [f'<p class="legend">{"".join(keys)}<span class="k sick">not finite</span></p>']
    for name, field, log in _CURVES:
        points = [(s.step, value) for s in samples if (value := number(getattr(s, field))) is not None]
        if points:
            last = _text(words.shown(getattr(samples[-1], field)))
            drawn = curve_svg(points, axis, label=name, log=log)
            parts.append(f"<figure><figcaption>{name} <span>at the end: {last}</span></figcaption>{drawn}</figure>")
    return "".join(parts) + _note(words.loss_note(report))


class Axis(msgspec.Struct, frozen=True):
    """The steps from the first to the last of `span`. `onset` and `good` are marked by upright lines; with
    `onset_through` the onset is a span."""

    span: tuple[int, int]
    onset: int | None = None
    onset_through: int | None = None
    good: int | None = None

    def shows(self, step: int | None) -> bool:
        """Whether a step is in the picture."""
        return step is not None and self.span[0] <= step <= self.span[1]

    def x(self, step: int) -> float:
        """Where a step lies."""
        first, last = self.span
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (step - first) / max(1, last - first)


def curve_svg(points: Sequence[tuple[int, float]], axis: Axis, *, label: str, log: bool = False) -> str:
    """A curve of (step, value). With `log` the scale is logarithmic where all values are positive and span more than
    a decade. The text of `label` must hold nothing but plain characters."""
    inside = [(step, value) for step, value in points if axis.shows(step)][-_MOST_POINTS:]
    finite = [(step, max(-_LARGEST, min(_LARGEST, value))) for step, value in inside if math.isfinite(value)]
    values = [value for _, value in finite] or [0.0, 1.0]
    low, high = min(values), max(values)
    log = log and low > 0 and high > 10 * low
    middle = math.sqrt(low) * math.sqrt(high) if log else (low + high) / 2
    y = _heights(low, high, math.log10 if log else float)
    ticks = dict.fromkeys((low, middle, high))
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label} by step" class="curve">']
    parts += [*_span(axis), *_grid(y, ticks, axis), *_mark(axis, axis.onset, "onset"), *_mark(axis, axis.good, "good")]
    parts += _line([(axis.x(step), y(value)) for step, value in finite])
    parts += [
        f'<circle class="sick" cx="{axis.x(step):.1f}" cy="{_TOP}" r="4"><title>step {step}: {_name(value)}'
        "</title></circle>"
        for step, value in inside
        if not math.isfinite(value)
    ]
    return "".join(parts) + "</svg>"


def _heights(low: float, high: float, of: Callable[[float], float]) -> Callable[[float], float]:
    """From values between `low` and `high` to heights in the picture, by a scale."""
    bottom, top = of(low), of(high)
    margin = 0.08 * (top - bottom) or abs(top) * 0.1 or 1.0

    def y(value: float) -> float:
        share = (of(value) - bottom + margin) / (top - bottom + 2 * margin)
        return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * min(1.0, max(0.0, share))

    return y


def _grid(y: Callable[[float], float], ticks: Iterable[float], axis: Axis) -> list[str]:
    parts = []
    for value in ticks:
        at = y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{at + 3.5:.1f}" text-anchor="end">{_short(value)}</text>')
    first, last = axis.span
    names = [(first, "start"), *([((first + last) // 2, "middle")] if last - first > 3 else []), (last, "end")]
    parts += [
        f'<text class="tick" x="{axis.x(step):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step:,}</text>'
        for step, anchor in names
    ]
    return parts


def _span(axis: Axis) -> list[str]:
    if axis.onset is None or axis.onset_through is None:
        return []
    left, right = (axis.x(max(axis.span[0], min(axis.span[1], s))) for s in (axis.onset, axis.onset_through))
    height = HEIGHT - _BOTTOM - _TOP + 10
    box = f'<rect class="span" x="{left:.1f}" y="{_TOP - 10}" width="{right - left:.1f}" height="{height}"/>'
    return [box] if right > left else []


def _mark(axis: Axis, step: int | None, kind: str) -> list[str]:
    if step is None or not axis.shows(step):
        return []
    x = axis.x(step)
    return [f'<line class="mark {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 10}" y2="{HEIGHT - _BOTTOM}"/>']


def _line(places: list[tuple[float, float]]) -> list[str]:
    if len(places) == 1:
        return [f'<circle class="dot" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2.5"/>']
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return [f'<polyline class="line" points="{points}"/>'] if places else []


def _short(value: float) -> str:
    if 0 < abs(value) < 0.01:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits}e{int(power)}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _name(value: float) -> str:
    return "NaN" if value != value else "infinity" if value > 0 else "minus infinity"
