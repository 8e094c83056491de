"""A silence: for some time nobody is disturbed about a run, while everything else goes on."""

from __future__ import annotations

import msgspec

LONGEST = 30 * 86400.0  # seconds: nobody forgets a run for longer
CLOCKS = 86400.0  # seconds by which the clocks of two machines may differ


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Until when nobody is disturbed about a run, why, and who said so, when. `until` is in seconds since 1970; None:
    the record cannot be read, and silences nothing. Text from files is escaped."""

    until: float | None = None
    reason: str = ""
    by: str = ""
    at: str = ""

    def holds(self, now: float) -> bool:
        """True if the run is silenced now. While a clock is wrong by months nothing is."""
        return self.until is not None and now < self.until <= now + LONGEST + CLOCKS


def as_of(silence: Silence | None, now: float) -> Silence | None:
    """Return what there is to show now: a silence that holds, or one that cannot be read."""
    return silence if silence is not None and (silence.until is None or silence.holds(now)) else None
