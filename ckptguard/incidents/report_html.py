"""An incident's report as one HTML page that needs nothing but itself: no script, no font, no image from elsewhere.

Pure, but for the style sheet beside it. Everything that is not ours goes through `_text`.
"""

from __future__ import annotations

import html
import importlib.resources
import math
from collections.abc import Callable, Iterable

from ckptguard.formats.dtypes import FP16_LIMIT
from ckptguard.incidents.curves_svg import Axis, curve_svg
from ckptguard.incidents.report_words import (
    NO_SICKNESS,
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
from ckptguard.values.incident import ChangedTensor, IncidentReport, LikelyCause, Magnitude, Number, Sample, number
from ckptguard.version import __version__

_MOST_ROWS = 12
_SMALLEST_BAR = 1e-3  # the magnitude at which a bar begins

_CURVES: tuple[tuple[str, Callable[[Sample], Number], bool, bool], ...] = (
    ("Loss", lambda s: s.loss, True, False),
    ("Gradient norm", lambda s: s.grad_norm, True, False),
    ("Loss scale", lambda s: s.scale, True, True),
    ("Learning rate", lambda s: s.lr, False, False),
)


def report_html(report: IncidentReport) -> str:
    """The whole page."""
    heading = _text(title(report))
    body = "".join(
        [
            _head(report, heading),
            _tiles(report),
            _causes(report),
            _curves(report),
            _tensors(report),
            _changes(report),
            _headroom(report),
            _pairs("How training computed", known_facts(report)),
            _pairs("What was noted", evidence_pairs(report)),
            _done(report),
            _next(report),
            f"<footer>Incident {_text(report.id)} &middot; ckptguard {_text(__version__)}</footer>",
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{heading}</title><style>\n{_style()}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def _style() -> str:
    """How the page looks: light and dark, narrow and wide, on screen and on paper."""
    return importlib.resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")


def _text(value: object) -> str:
    return html.escape(escape(str(value)), quote=True)


def _head(report: IncidentReport, heading: str) -> str:
    state = report.state if report.state in ("open", "handling", "closed") else "open"
    mended = state == "closed" and (report.known_good is not None or report.cause in NO_SICKNESS)
    return (
        f'<header class="{"mended" if mended else state}">'
        f'<p class="over"><span class="pill {state}">{_text(report.state)}</span> '
        f"{_text(when(report.opened_at))} &middot; noticed by {_text(report.source)}</p>"
        f'<h1>{heading}</h1><p class="lead">{_text(report.reason)}</p>'
        f'<p class="outcome">{_text(outcome(report))}</p>'
        f'<p class="run"><code>{_text(report.run)}</code></p></header>'
    )


def _tiles(report: IncidentReport) -> str:
    good, causes = report.details.last_good, report.details.causes
    back = report.known_good or (good.id if good is not None else None)
    tiles = [
        ("Onset", f"step {onset_words(report)}", onset_note(report) or "the first update under suspicion"),
        ("Noticed", f"step {shown(report.step)}", _later(report)),
        ("Last good", shown(back), good.path if good is not None else "no good checkpoint is known"),
        *([("Most likely" if causes[0].confidence == "likely" else "Possibly", causes[0].title, "")] if causes else []),
    ]
    cells = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}<small>{_text(note)}</small></dd></div>"
        for name, value, note in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _later(report: IncidentReport) -> str:
    if report.step is None or report.onset is None:
        return ""
    late = report.step - report.onset
    if late <= 0:
        return "in that very update"
    return f"{'at most ' if onset_note(report) else ''}{late} update{'s' * (late > 1)} later"


def _causes(report: IncidentReport) -> str:
    if not report.details.causes:
        return ""
    first, *others = report.details.causes
    parts = [f'<article class="cause first {_rank(first)}">{_cause_head(first)}{_cause_body(first)}</article>']
    parts += [
        f'<details class="cause {_rank(c)}"><summary>{_cause_head(c)}</summary>{_cause_body(c)}</details>'
        for c in others
    ]
    return _section("Likely causes, and what to do", "".join(parts))


def _rank(cause: LikelyCause) -> str:
    return "likely" if cause.confidence == "likely" else "possible"


def _cause_head(cause: LikelyCause) -> str:
    return f'<h3>{_text(cause.title)} <span class="pill {_rank(cause)}">{_text(cause.confidence)}</span></h3>'


def _cause_body(cause: LikelyCause) -> str:
    because = "".join(f"<li>{_text(reason)}</li>" for reason in cause.because)
    advice = "".join(f"<li>{_text(line)}</li>" for line in cause.advice)
    return f'<ul class="because">{because}</ul><p class="do">What to do</p><ol class="advice">{advice}</ol>'


def _curves(report: IncidentReport) -> str:
    samples = report.details.samples
    if not samples:
        return ""
    span = (samples[0].step, samples[-1].step)
    good = report.details.last_good
    axis = Axis(
        span=span,
        onset=report.onset,
        onset_through=report.details.onset_through,
        good=good.step if good is not None else None,
    )
    figures = []
    for name, of, log, steps in _CURVES:
        points = [(s.step, value) for s in samples if (value := number(of(s))) is not None]
        if points:
            drawn = curve_svg(points, axis, label=name, log=log, steps=steps)
            last = shown(of(samples[-1]))
            figures.append(
                f"<figure><figcaption>{name} <span>at the end: {_text(last)}</span></figcaption>{drawn}</figure>"
            )
    marks = [
        ("onset", "onset", report.onset),
        ("good", "last good checkpoint", good.step if good is not None else None),
    ]
    keys = [
        f'<span class="k {k}">{name}</span>' for k, name, at in marks if at is not None and span[0] <= at <= span[1]
    ]
    legend = f'<p class="legend">{"".join(keys)}<span class="k sick">not finite</span></p>'
    note = loss_note(report)
    figures.append(f'<p class="note">{_text(note)}</p>' if note else "")
    return _section("The updates before", legend + "".join(figures))


def _tensors(report: IncidentReport) -> str:
    tensors = report.details.tensors
    if not tensors:
        return ""
    rows = "".join(
        f'<tr><td><span class="kind">{_text(t.kind)}</span></td><td><code>{_text(t.name)}</code></td>'
        f"<td>{_text(tensor_line(t))}</td></tr>"
        for t in tensors[:_MOST_ROWS]
    )
    left = max(0, len(tensors) - _MOST_ROWS) + report.details.tensors_omitted
    more = f'<p class="note">and {left} more</p>' if left > 0 else ""
    note = f'<p class="note">{_text(tensors_title(report))}, in the order of the model.</p>'
    head = "<thead><tr><th>kind</th><th>tensor</th><th>what</th></tr></thead>"
    return _section("What went first", f'{note}<div class="wide"><table>{head}{rows}</table></div>{more}')


def _changes(report: IncidentReport) -> str:
    name, details = changes_title(report), report.details
    if name is None:
        return ""
    rows = "".join(
        f"<tr><td><code>{_text(c.name)}</code>"
        f"{'' if c.role == 'model' else f' <span class=kind>{_text(c.role)}</span>'}</td>"
        f'<td class="{"became" if c.became_nonfinite else ""}">{_text(change_line(c))}</td>{_before(c)}</tr>'
        for c in details.changes[:_MOST_ROWS]
    )
    left = max(0, len(details.changes) - _MOST_ROWS) + details.changes_omitted
    more = f'<p class="note">and {left} more</p>' if left > 0 else ""
    warning = f'<p class="note">{_text(details.changes_note)}</p>' if details.changes_note is not None else ""
    head = (
        '<thead><tr><th>tensor</th><th>change</th><th class="num">largest before</th>'
        '<th class="num">of fp16</th></tr></thead>'
    )
    table = f'<div class="wide"><table class="changes">{head}{rows}</table></div>' if rows else ""
    note = f'<p class="note">{_text(name)}: what became NaN or Inf first, then what changed most.</p>'
    return _section("What changed", f"{note}{table}{more}{warning}")


def _before(change: ChangedTensor) -> str:
    largest = _plain(change.largest) if change.largest is not None else "-"
    return f'<td class="num">{largest}</td><td class="num">{_text(share_of_fp16(change.largest))}</td>'


def _headroom(report: IncidentReport) -> str:
    good = report.details.last_good
    if good is None or not good.largest:
        return ""
    rows = "".join(_bar(m) for m in good.largest[:_MOST_ROWS])
    left = len(good.largest) - _MOST_ROWS
    more = f'<p class="note">and {left} more, all smaller</p>' if left > 0 else ""
    note = (
        f'<p class="note">The largest magnitudes in <code>{_text(good.path)}</code>, the last good checkpoint. '
        f"fp16 ends at 65504; the bars are logarithmic.</p>"
    )
    return _section("Headroom in fp16", f'{note}<div class="wide"><table class="bars">{rows}</table></div>{more}')


def _bar(magnitude: Magnitude) -> str:
    share = magnitude.largest / FP16_LIMIT if math.isfinite(magnitude.largest) else 2.0
    full = math.log10(FP16_LIMIT / _SMALLEST_BAR)
    length = 0.0 if magnitude.largest <= _SMALLEST_BAR else math.log10(magnitude.largest / _SMALLEST_BAR) / full
    rank = "over" if share > 0.5 else "near" if share > 0.1 else "far"
    left = "beyond it" if share > 1 else f"{_plain(1 / share)} times below it" if share > 0 else "all zero"
    return (
        f'<tr><td><code>{_text(magnitude.tensor)}</code></td><td class="num">{_plain(magnitude.largest)}</td>'
        f'<td class="bar"><i class="{rank}" style="width:{100 * min(1.0, max(0.0, length)):.1f}%"></i></td>'
        f"<td>{left}</td></tr>"
    )


def _plain(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e9 else f"{value:.3g}"


def _pairs(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<div><dt>{_text(key)}</dt><dd>{_text(value)}</dd></div>" for key, value in pairs)
    return _section(name, f'<dl class="facts">{cells}</dl>') if cells else ""


def _done(report: IncidentReport) -> str:
    steps = "".join(f"<li>{_text(action)}</li>" for action in report.actions)
    return _section("What was done", f'<ol class="done">{steps}</ol>') if steps else ""


def _next(report: IncidentReport) -> str:
    lines = "".join(
        f'<p class="command"><code>{_text(command)}</code> {_text(why)}</p>' for command, why in next_commands(report)
    )
    return _section("Next", lines)


def _section(name: str, content: str) -> str:
    return f"<section><h2>{_text(name)}</h2>{content}</section>"
