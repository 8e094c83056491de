"""The signals of a training over its updates: thinned, and column by column."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec

from ckptguard.values.ids import MAX_STEP
from ckptguard.values.incident import WORDS, Number, number, worded

MOST_POINTS = 4096  # of a run, over all of its attempts
MOST_SKIPPED = 256

# Step, loss, gradient norm, loss scale and learning rate of one update.
Row = tuple[int, float | None, float | None, float | None, float | None]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One column a signal and one place an update, in the order in which the updates were made.

    `began`: the places at which training began, or went back to an earlier step. `skipped`: the first and last update
    of those whose batches were left out later. `kept`: places of updates that must not be thinned out. `levels` say
    how far it was thinned already.
    """

    step: tuple[int, ...] = ()
    loss: tuple[Number, ...] = ()
    grad_norm: tuple[Number, ...] = ()
    scale: tuple[Number, ...] = ()
    lr: tuple[Number, ...] = ()
    began: tuple[int, ...] = ()
    skipped: tuple[tuple[int, int], ...] = ()
    kept: tuple[int, ...] = ()
    levels: tuple[int, int] = (0, 0)

    def rows(self) -> Iterator[Row]:
        """Yield its updates."""
        for step, *signals in zip(self.step, self.loss, self.grad_norm, self.scale, self.lr, strict=True):
            loss, norm, scale, lr = map(number, signals)
            yield step, loss, norm, scale, lr


def curve_of(rows: Iterable[Row]) -> Curve:
    """Return the curve of some updates. An attempt begins wherever their steps go back."""
    found = list(rows)
    step, *signals = zip(*found, strict=True) if found else ((),) * 5
    loss, norm, scale, lr = (tuple(map(_short, column)) for column in signals)
    back = [place for place, (a, b) in enumerate(pairwise(step), 1) if b < a]
    began = (0, *back) if found else ()
    return Curve(step=tuple(step), loss=loss, grad_norm=norm, scale=scale, lr=lr, began=began)


def is_sound(curve: Curve) -> bool:
    """True if everything in a curve from a file is possible."""
    count = len(curve.step)
    columns = (curve.loss, curve.grad_norm, curve.scale, curve.lr)
    places = (*curve.began, *curve.kept)
    return (
        count <= MOST_POINTS
        and all(len(column) == count for column in columns)
        and all(0 <= step <= MAX_STEP for step in curve.step)
        and all(value in WORDS for column in columns for value in column if isinstance(value, str))
        and all(0 <= place < count for place in places)
        and all(0 <= first <= last <= MAX_STEP for first, last in curve.skipped)
        and all(0 <= level <= 128 for level in curve.levels)
    )


def is_finite(row: Row) -> bool:
    """True if no number of an update is NaN or infinite."""
    return all(value is None or math.isfinite(value) for value in row[1:])


def _short(value: float | None) -> Number:
    """Return a number with six digits."""
    return worded(None if value is None else float(f"{value:.6g}"))
