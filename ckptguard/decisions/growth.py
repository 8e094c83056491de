"""How fast a run fills its disk, by its saves on record, and when the disk will be full. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ckptguard.values.plain_numbers import age, size
from ckptguard.values.run_summary import RunSummary

_FEWEST = 4  # saves
_SHORTEST = 600.0  # seconds: saves of a shorter time say nothing about days
_SOON = 14 * 86400.0  # seconds before the disk is full, from which on a person is told
_DAY = 86400.0


def growth_of(saves: Iterable[tuple[float, int]]) -> float | None:
    """Return by how many bytes a second a run grows, or None if too few saves are on record.

    Each save is when it was made, and the bytes of it that are still there. Only the older half counts: what a rotation
    or a rule removes is gone by then, and what is left of it stays.
    """
    ordered = sorted(saves)
    half = len(ordered) // 2
    span = ordered[half][0] - ordered[0][0] if len(ordered) >= _FEWEST else 0.0
    return sum(left for _, left in ordered[:half]) / span if span >= _SHORTEST else None


def full_in(free: int | None, growth: float | None, together: float) -> float | None:
    """Return in how many seconds a disk is full on which a run grows. `together` is by how much all runs there do.
    None: it does not grow, or nobody knows."""
    if free is None or not growth or growth <= 0:
        return None
    return free / max(growth, together)


def unless_room(growth: float | None, free: int | None, budget_left: int | None) -> float | None:
    """Return the growth of a run, or None if its budget holds it before the disk is full. `budget_left` is by how much
    that lets it grow; None: it has none."""
    return growth if budget_left is None or free is None or budget_left > free else None


def filling_words(run: RunSummary) -> str | None:
    """Say that the disk is full soon, or None."""
    if run.full_in is None or run.growth is None or run.full_in > _SOON:
        return None
    return (
        f"its disk is full in about {age(run.full_in)}: the run grows by {size(int(run.growth * _DAY))} a day,"
        f" and {size(run.free)} are free"
    )
