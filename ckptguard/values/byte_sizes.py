"""Sizes as people write them: ``2TB``, ``500GiB``."""

from __future__ import annotations

import re

from ckptguard.errors import SettingsError

_SIZE = re.compile(r"(?P<amount>\d{1,15}(\.\d{1,6})?)\s*(?P<unit>[kMGTP]?)(?P<binary>i?)B?")


def parse_size(text: float | str) -> int:
    """Return the bytes of a size: a number, or ``2TB``, ``500GiB``. Raises SettingsError."""
    match = _SIZE.fullmatch(str(text)) if not isinstance(text, bool) else None
    if match is None:
        raise SettingsError(f"{text!r} is no size", hint="use 2TB, 500GiB or a number of bytes")
    power = " kMGTP".index(match["unit"] or " ")
    return int(float(match["amount"]) * (1024 if match["binary"] else 1000) ** power)
