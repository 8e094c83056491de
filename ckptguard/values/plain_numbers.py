"""Sizes and spans of time as people read them. Light: every command's help imports it."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: int | None, *, like: int | None = None) -> str:
    """Bytes as people read them, in the unit of `like`: numbers of one unit compare at a glance."""
    if count is None:
        return "-"
    of = count if like is None else like
    power = next((power for power in range(len(_UNITS) - 1) if of < 1024 ** (power + 1)), len(_UNITS) - 1)
    if power == 0:
        return f"{count} B"
    amount = f"{count / 1024**power:.1f}"
    return f"{'<0.1' if count and amount == '0.0' else amount} {_UNITS[power]}"


def made_again(count: int, unit: str = "step", seconds: float | None = None) -> str:
    """Say how many updates a training makes again, and how long these took; "" if it is none."""
    if count <= 0:
        return ""
    took = f", about {age(seconds)} of training," if seconds is not None and seconds >= 1 else ""
    return f"{count} {unit}s{took} are made again" if count > 1 else f"1 {unit}{took} is made again"


def age(seconds: float | None) -> str:
    """A span of time as people read it."""
    if seconds is None:
        return "-"
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return "1 second" if round(seconds) == 1 else f"{seconds:.0f} seconds"
