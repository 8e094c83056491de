"""What a daemon is reading again, as its answers tell."""

from __future__ import annotations

import msgspec

from ckptguard.values.ids import CheckpointId


class PlaceAt(msgspec.Struct, frozen=True, kw_only=True):
    """A place of a generation, and when it was read, or is to be read; `at` is in seconds since 1970."""

    path: str
    id: CheckpointId
    place: str
    at: float | None


class ScrubState(msgspec.Struct, frozen=True, kw_only=True):
    """What is read now, what was read last and when, and what is due next and when."""

    every: float
    rate: float | None
    reading: PlaceAt | None = None
    last: PlaceAt | None = None
    next: PlaceAt | None = None
