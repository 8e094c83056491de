"""Decide when a kept copy that is a hard link must become a full copy. Pure."""

from __future__ import annotations

import msgspec

from ckptguard.values.settings import Settings


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A kept copy of a good checkpoint. `at` is when it was made, in seconds since 1970, or None if unknown."""

    bytes: int
    at: float | None


def owes_bytes(newest: Kept, own: Kept | None, settings: Settings, *, saved_over: bool) -> bool:
    """True if the newest good copy, a hard link, must become a full copy now. `own` is the newest good full copy.

    There is always a full copy of a good checkpoint. For large checkpoints it may be older than the newest by
    `copy_every` seconds, until a file of the run is overwritten in place.
    """
    if own is None or saved_over or newest.bytes <= settings.copy_limit or newest.at is None or own.at is None:
        return True
    return newest.at - own.at >= settings.copy_every
