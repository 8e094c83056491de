"""Curves as inline SVG: one line over steps, with what is not finite marked where it happened. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

WIDTH, HEIGHT = 720, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 16, 24
_MOST_POINTS = 1000
_LARGEST = 1e300  # differences of what is drawn stay finite


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


def curve_svg(
    points: Sequence[tuple[int, float]], axis: Axis, *, label: str, log: bool = False, steps: bool = False
) -> str:
    """A curve of (step, value). With `log` the scale is logarithmic where all values are positive and span more than
    a decade; `steps` draws a staircase.

    The text of `label` must hold nothing but plain characters.
    """
    inside = [(step, value) for step, value in points if axis.shows(step)][-_MOST_POINTS:]
    finite = [(step, max(-_LARGEST, min(_LARGEST, value))) for step, value in inside if math.isfinite(value)]
    values = [value for _, value in finite] or [0.0, 1.0]
    scale = _Scale(min(values), max(values), log)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label} by step" class="curve">']
    parts += [*_span(axis), *_grid(scale, axis), *_mark(axis, axis.onset, "onset"), *_mark(axis, axis.good, "good")]
    parts += _line([(axis.x(step), scale.y(value)) for step, value in finite], steps=steps)
    parts += [
        f'<circle class="sick" cx="{axis.x(step):.1f}" cy="{_TOP}" r="4"><title>step {step}: {_name(value)}'
        "</title></circle>"
        for step, value in inside
        if not math.isfinite(value)
    ]
    return "".join(parts) + "</svg>"


class _Scale:
    """From values to heights in the picture."""

    def __init__(self, low: float, high: float, log: bool) -> None:
        self._log = log and low > 0 and high > 10 * low
        margin = 0.0 if self._log else 0.08 * (high - low) or abs(high) * 0.1 or 1.0
        self._low, self._high = low - margin, high + margin

    def y(self, value: float) -> float:
        """Where a value lies."""
        of = math.log10 if self._log else float
        low, high = of(self._low), of(self._high)
        share = (of(value) - low) / (high - low) if high > low else 0.5
        return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        """Values to name at the left."""
        if not self._log:
            return [self._low + share * (self._high - self._low) for share in (0.08, 0.5, 0.92)]
        first, last = math.ceil(math.log10(self._low)), math.floor(math.log10(self._high))
        if last - first < 1:
            return [self._low, self._high]
        stride = max(1, math.ceil((last - first + 1) / 4))
        return [10.0**power for power in range(first, last + 1, stride)]


def _grid(scale: _Scale, axis: Axis) -> list[str]:
    parts = []
    for value in scale.ticks():
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{_short(value)}</text>')
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


def _line(places: list[tuple[float, float]], *, steps: bool) -> list[str]:
    if len(places) == 1:
        return [f'<circle class="dot" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2.5"/>']
    if steps:  # a corner before each but the first
        corners = [(x, y) for (x, _), (_, y) in zip(places[1:], places, strict=False)]
        places = [*places[:1], *(place for both in zip(corners, places[1:], strict=True) for place in both)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return [f'<polyline class="line" points="{points}"/>'] if places else []


def _short(value: float) -> str:
    if 0 < abs(value) < 0.01:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits}e{int(power)}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _name(value: float) -> str:
    return "NaN" if value != value else "infinity" if value > 0 else "minus infinity"
