"""Rates as users write them: ``100MB``, ``50MiB/s``."""

from __future__ import annotations

import re

import click

_RATE = re.compile(r"(?P<amount>\d{1,15}(\.\d{1,6})?)\s*(?P<unit>[kMGT]?)(?P<binary>i?)B?(/s)?")
_UNITS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_LEAST_RATE = 2**16


def parse_rate(text: str) -> float:
    """Bytes a second. BadParameter of --rate."""
    match = _RATE.fullmatch(text)
    amount = 0.0
    if match is not None:
        amount = float(match["amount"]) * (1024 if match["binary"] else 1000) ** _UNITS[match["unit"]]
    if not _LEAST_RATE <= amount < 1e15:
        raise click.BadParameter(f"{text!r} is no rate of 65536 bytes a second or more", param_hint="--rate")
    return amount
