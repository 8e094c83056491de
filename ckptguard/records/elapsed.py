"""How much time has passed for sure? A wall clock may be wrong by years, and jump."""

from __future__ import annotations

import datetime
import time

import msgspec

from ckptguard.records.daemon_record import this_host


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A moment by the wall clock (seconds since 1970) and by the machine's own: seconds since its start."""

    wall: float
    host: str
    boot_id: str
    uptime: float


def this_moment() -> Moment:
    """Now, here."""
    host, boot_id = this_host()
    return Moment(wall=time.time(), host=host, boot_id=boot_id, uptime=_uptime())


def surely_passed(before: Moment, now: Moment) -> float:
    """Seconds that have passed at least: on the same start of the same machine by its own clock, which nobody sets.
    Between two machines, or two starts of one, none are sure: see `sightings`. Where a system does not tell its starts
    apart it is by the wall clock, and no more than since the last start."""
    if before.boot_id or now.boot_id:
        return max(0.0, now.uptime - before.uptime) if before.boot_id == now.boot_id else 0.0
    return max(0.0, min(now.wall - before.wall, now.uptime)) if before.host == now.host else 0.0


def seconds_of(text: str) -> float | None:
    """A time of a record as seconds since 1970; None for what is none."""
    try:
        moment = datetime.datetime.fromisoformat(text)
        return moment.timestamp() if moment.tzinfo is not None else None
    except (ValueError, OverflowError, OSError):
        return None


def _uptime() -> float:
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # it goes on while the machine sleeps
    return time.clock_gettime(clock)
