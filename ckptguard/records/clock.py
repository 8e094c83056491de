"""The time as records state it. It is for people: no order and no decision ever comes from it."""

from __future__ import annotations

import datetime


def utc_now() -> str:
    """The time now, ISO 8601, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
