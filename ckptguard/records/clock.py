"""The time as records state it. It is for people: no order and no decision ever comes from it."""

from __future__ import annotations

import datetime

_FORM = "%Y-%m-%dT%H:%M:%SZ"


def utc_now() -> str:
    """The time now, ISO 8601, UTC, to the second."""
    return utc_moment()[0]


def utc_text(seconds: float) -> str:
    """Seconds since 1970 in the form of `utc_now`."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime(_FORM)


def utc_moment() -> tuple[str, int]:
    """`utc_now`, and the microseconds that have passed since."""
    now = datetime.datetime.now(datetime.UTC)
    return now.strftime(_FORM), now.microsecond
