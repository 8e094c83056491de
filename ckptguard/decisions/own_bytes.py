"""When does a kept copy that is a hard link owe bytes of its own? Pure."""

from __future__ import annotations

import msgspec

from ckptguard.values.settings import Settings


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A kept copy of a good checkpoint: its size, and when it was made, in seconds since 1970 if that can be told."""

    bytes: int
    at: float | None


def owes_bytes(newest: Kept, own: Kept | None, settings: Settings, *, saved_over: bool) -> bool:
    """True if the newest good one, a link, is to get them now; `own` is the newest good one that has them.

    Some good one always has them. That is the newest, except for large ones: there it may be behind by `copy_every`,
    until the first file of the run is seen to be saved over in place."""
    if own is None or saved_over or newest.bytes <= settings.copy_limit or newest.at is None or own.at is None:
        return True
    return newest.at - own.at >= settings.copy_every
