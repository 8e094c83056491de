"""Curves as inline SVG: one line over steps, with what is not finite marked where it happened. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

WIDTH, HEIGHT = 720, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 16, 24
_MOST_POINTS = 1000
_LARGEST = 1e300  # differences of what is drawn stay finite


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """The steps from the first to the last of `span`. `onset` and `good` are marked by upright lines; with
    `onset_through` the onset is a span."""

    span: tuple[int, int]
    onset: int | None = None
    onset_through: int | None = None
    good: int | None = None


def curve_svg(
    points: Sequence[tuple[int, float]], axis: Axis, *, label: str, log: bool = False, steps: bool = False
) -> str:
    """A curve of (step, value). With `log` the scale is logarithmic where all values are positive and span more than
    a decade; `steps` draws a staircase.

    The text of `label` must hold nothing but plain characters.
    """
    span = axis.span
    inside = [(step, value) for step, value in points if span[0] <= step <= span[1]][-_MOST_POINTS:]
    finite = [(step, max(-_LARGEST, min(_LARGEST, value))) for step, value in inside if math.isfinite(value)]
    sick = [(step, value) for step, value in inside if not math.isfinite(value)]
    values = [value for _, value in finite]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    logarithmic = log and low > 0 and high > 10 * low
    scale = _Scale(span, low, high, logarithmic)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label} by step" class="curve">',
        *_span(scale, axis),
        *_grid(scale, span),
        *_mark(scale, axis.onset, "onset", span),
        *_mark(scale, axis.good, "good", span),
        *_line(scale, finite, steps=steps),
        *(
            f'<circle class="sick" cx="{scale.x(step):.1f}" cy="{_TOP}" r="4"><title>step {step}: {_name(value)}'
            "</title></circle>"
            for step, value in sick
        ),
        "</svg>",
    ]
    return "".join(parts)


class _Scale:
    """From step and value to places in the picture."""

    def __init__(self, span: tuple[int, int], low: float, high: float, logarithmic: bool) -> None:
        self._first, self._last = span
        self._log = logarithmic
        if not logarithmic:
            margin = 0.08 * (high - low) or abs(high) * 0.1 or 1.0
            low, high = low - margin, high + margin
        self.low, self.high = low, high

    def x(self, step: int) -> float:
        """Where a step lies."""
        width = WIDTH - _LEFT - _RIGHT
        return _LEFT + width * (step - self._first) / max(1, self._last - self._first)

    def y(self, value: float) -> float:
        """Where a value lies."""
        of = math.log10 if self._log else float
        low, high = of(self.low), of(self.high)
        share = (of(value) - low) / (high - low) if high > low else 0.5
        return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        """Values to name at the left."""
        if not self._log:
            return [self.low + share * (self.high - self.low) for share in (0.08, 0.5, 0.92)]
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        if last - first < 1:
            return [self.low, self.high]
        stride = max(1, math.ceil((last - first + 1) / 4))
        return [10.0**power for power in range(first, last + 1, stride)]


def _grid(scale: _Scale, span: tuple[int, int]) -> list[str]:
    parts = []
    for value in scale.ticks():
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{_short(value)}</text>')
    first, last = span
    names = [(first, "start"), *([((first + last) // 2, "middle")] if last - first > 3 else []), (last, "end")]
    parts += [
        f'<text class="tick" x="{scale.x(step):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step:,}</text>'
        for step, anchor in names
    ]
    return parts


def _span(scale: _Scale, axis: Axis) -> list[str]:
    first, last, span = axis.onset, axis.onset_through, axis.span
    if first is None or last is None:
        return []
    left, right = (scale.x(max(span[0], min(span[1], step))) for step in (first, last))
    height = HEIGHT - _BOTTOM - _TOP + 10
    if right <= left:
        return []
    return [f'<rect class="span" x="{left:.1f}" y="{_TOP - 10}" width="{right - left:.1f}" height="{height}"/>']


def _mark(scale: _Scale, step: int | None, kind: str, span: tuple[int, int]) -> list[str]:
    if step is None or not span[0] <= step <= span[1]:
        return []
    x = scale.x(step)
    return [f'<line class="mark {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 10}" y2="{HEIGHT - _BOTTOM}"/>']


def _line(scale: _Scale, finite: Sequence[tuple[int, float]], *, steps: bool) -> list[str]:
    places: list[tuple[float, float]] = []
    for step, value in finite:
        place = scale.x(step), scale.y(value)
        if steps and places:
            places.append((place[0], places[-1][1]))
        places.append(place)
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
