"""What retention must keep: rules as values, parsed from words such as ``2d`` and ``eval_loss:min:3``."""

from __future__ import annotations

import math
import re

import msgspec

from ckptguard.errors import SettingsError

_SECONDS = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}
_SPAN = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})?[wdhms]){1,5}")
_AMOUNT = re.compile(r"([\d.]+)([wdhms])")
_BEST = re.compile(r"(?P<metric>.+?):(?P<way>min|max)(?::(?P<count>[1-9][0-9]{0,5}))?", re.DOTALL)


class Best(msgspec.Struct, frozen=True):
    """The `count` best by one metric. `way` is "min" or "max"."""

    metric: str
    way: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.metric}:{self.way}:{self.count}"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The rules for one series: a checkpoint stays if any of them keeps it. Without a `keep_` rule nothing good is
    removed.

    The newest `keep_good` GOOD ones always stay, with all that they hold. Of those older than the newest `thin_after`
    that stay, what only a resume needs is removed. What a run of more than `keep_bytes` loses says
    `decisions/budget.py`. Raises SettingsError for an impossible rule.
    """

    keep_last: int | None = None  # the newest n
    keep_every: int | None = None  # the first of every n steps
    keep_within: float | None = None  # seconds
    keep_best: tuple[Best, ...] = ()
    keep_good: int = 2
    thin_after: int | None = None
    keep_bytes: int | None = None  # of the whole run
    drop_failed: bool = False  # also remove BAD, INCOMPLETE and SUSPECT ones that have `keep_good` newer GOOD ones

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_good", "thin_after"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 10**12:
                raise SettingsError(f"{name} must be at least 1, not {value}")
        if self.keep_bytes is not None and not 1 <= self.keep_bytes < 10**18:
            raise SettingsError(f"keep_bytes must be at least 1 byte, not {self.keep_bytes}")
        if self.keep_within is not None and not 0 < self.keep_within < 1e10:
            raise SettingsError(f"keep_within must be a span of time, such as 2d, not {self.keep_within}")

    @property
    def has_rules(self) -> bool:
        """True if any rule says which GOOD checkpoints stay, so that others may be removed."""
        return bool(self.keep_last or self.keep_every or self.keep_within or self.keep_best)

    @property
    def asks_nothing(self) -> bool:
        """True if nothing may be removed."""
        return not self.has_rules and not self.drop_failed and self.thin_after is None and self.keep_bytes is None


def parse_span(text: float | str) -> float:
    """Return the seconds of a time span: a number, or ``2d``, ``12h``, ``1d12h``, ``30m``, ``1w``. Raises
    SettingsError."""
    if isinstance(text, str):
        if _SPAN.fullmatch(text):
            return float(sum(float(amount) * _SECONDS[unit] for amount, unit in _AMOUNT.findall(text)))
        try:
            text = float(text)
        except ValueError:
            raise SettingsError(
                f"{text!r} is not a time span", hint="use 2d, 12h, 30m or a number of seconds"
            ) from None
    if not math.isfinite(text) or text < 0:
        raise SettingsError(f"{text} is not a time span", hint="use 2d, 12h, 30m or a number of seconds")
    return float(text)


def parse_best(text: str) -> Best:
    """Parse ``METRIC:min|max[:N]``. Raises SettingsError."""
    match = _BEST.fullmatch(text)
    if match is None:
        raise SettingsError(f"{text!r} is not METRIC:min|max[:N]", hint="for example eval_loss:min, or accuracy:max:3")
    return Best(match["metric"], match["way"], int(match["count"] or 1))


def span_text(seconds: float) -> str:
    """Return a time span as text for `parse_span`, in its largest whole unit."""
    for unit, length in _SECONDS.items():
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:g}s"
