"""Decide how much room the next saves need, which kept copies are released to leave it, and which become full copies.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ckptguard.decisions.fleet_health import is_training, save_interval, shortest_interval
from ckptguard.values.settings import Settings

_UNKNOWN_PACE = 86400.0  # seconds for which a run with a single save counts as training
_SHARE = 16  # one such part of a save more, because saves grow
SPARE = 1 << 20  # bytes more, for records and what the file system itself needs


class SeriesSaves(msgspec.Struct, frozen=True, kw_only=True):
    """The saves of one series: the bytes that its next save needs, and when its saves were written."""

    bytes: int
    saved_at: tuple[float, ...]

    @property
    def newest_at(self) -> float | None:
        """When the newest was written, in seconds since 1970."""
        return max(self.saved_at, default=None)


class NextSave(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that a run's next save needs, and until when the run counts as training (seconds since 1970)."""

    bytes: int
    until: float


def next_save(series: Sequence[SeriesSaves]) -> NextSave:
    """Return what the next save of a run needs: all series that are being saved, and the largest of the others.

    The series of one run are saved together. A series that the run has stopped to save may come again alone.
    """
    newest = max((one.newest_at for one in series if one.newest_at is not None), default=None)
    pace = shortest_interval({str(number): one.saved_at for number, one in enumerate(series)})
    if newest is None:
        return NextSave(bytes=sum(one.bytes for one in series), until=float("inf"))
    active, others = [0], [0]
    for one in series:
        own = max(save_interval(one.saved_at) or 0.0, pace or 0.0)
        saved = pace is None or one.newest_at is None or is_training(newest, one.newest_at, own)
        (active if saved else others).append(one.bytes)
    until = newest + (_UNKNOWN_PACE if pace is None else 3 * pace)
    return NextSave(bytes=sum(active) + max(others), until=until)


def together(runs: Iterable[NextSave], now: float) -> int:
    """Return what the next saves of several runs on one file system need: those of all that train, which may come at
    the same time, and the largest of the others. A reserve is included."""
    every = list(runs)
    training = sum(one.bytes for one in every if one.until >= now)
    needed = training + max((one.bytes for one in every if one.until < now), default=0)
    return needed + needed // _SHARE + SPARE if every else 0


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A kept copy: the bytes that its release frees `now`, and those that it would take `later`, when the trainer
    deletes the file that it shares them with. `stays`: it must not be released."""

    now: int
    later: int
    stays: bool = False


def to_release(oldest_first: Sequence[Held], free: int, needed: int) -> list[int]:
    """Return the places of the copies to release, in order, so that `needed` bytes are free now and later.

    All that may go is returned if even that is too little.
    """
    going = [number for number, held in enumerate(oldest_first) if not held.stays]
    later = sum(oldest_first[number].later for number in going)
    chosen: list[int] = []
    for number in going:
        if free - later >= needed:
            break
        free, later = free + oldest_first[number].now, later - oldest_first[number].later
        chosen.append(number)
    return chosen


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
