"""How often a run on an object store is looked at, and what its requests cost. Pure.

Prices are those of S3 in its first region, in dollars. Other stores have others, of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from ckptguard.values.storage_options import PAGE

LONGEST_PAUSE = 900.0  # seconds between two looks at a run in which nothing changes
SAVE_REQUESTS = 30  # the most for a new save of six files, besides the reading of its bytes
_TIMES = 30  # the pause grows to at most this multiple of `scan_interval`
_LOOKS_EACH_SAVE = 4
_MONTH = 30 * 86400.0  # seconds
_FOR_LIST_OR_PUT = 0.005 / 1000  # dollars


class LookCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the looks at runs cost in a month of 30 days: requests that list, and dollars."""

    requests: int
    dollars: float


def longest_pause(scan_interval: float) -> float:
    """Return the longest time between two looks, in seconds."""
    return max(scan_interval, min(_TIMES * scan_interval, LONGEST_PAUSE))


def next_pause(
    scan_interval: float, last: float, *, changed: bool, save_interval: float | None, is_hinted: bool = False
) -> float:
    """Return the seconds until the next look, after one that came `last` seconds after the one before.

    `changed`: it saw something new. `save_interval` are the seconds between two saves if training goes on. `is_hinted`:
    the store says when something changes.
    """
    if changed:
        return scan_interval
    if is_hinted:
        return max(scan_interval, LONGEST_PAUSE)
    longest = longest_pause(scan_interval)
    if save_interval is not None:
        longest = max(scan_interval, min(longest, save_interval / _LOOKS_EACH_SAVE))
    return min(max(2 * last, scan_interval), longest)


def cost_of_looks(pauses: Iterable[float], *, objects: int = PAGE) -> LookCost:
    """Return what looks at runs cost, one pause for each. `objects` are those of each run, its records among them."""
    requests = sum(math.ceil(_MONTH / pause) for pause in pauses) * max(math.ceil(objects / PAGE), 1)
    return LookCost(requests=requests, dollars=round(requests * _FOR_LIST_OR_PUT, 2))


def cost_of_save() -> float:
    """Return at most what the requests for one new save cost, in dollars."""
    return SAVE_REQUESTS * _FOR_LIST_OR_PUT
