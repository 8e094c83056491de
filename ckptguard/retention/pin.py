"""Pin a checkpoint: it stays under any policy until it is unpinned or its time is over."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from ckptguard.errors import NotFoundError, SettingsError
from ckptguard.layouts import Checkpoint
from ckptguard.records.pins import PINNED, Pin, list_pins, pin_checkpoint, release_pin
from ckptguard.runs.run_view import RunView
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import parse_span


def pin(view: RunView, checkpoint: Checkpoint, *, note: str = "", lasts: datetime.timedelta | None = None) -> Pin:
    """Pin a checkpoint in place. Raises RecordsError if its generation is unknown."""
    return pin_checkpoint(view.run, pinned_id(view, checkpoint), lasts=lasts, note=note)


def unpin(view: RunView, checkpoint: Checkpoint) -> list[Pin]:
    """Release every pin that a user set. Checkpoints in use stay in use. Raises NotFoundError if there is none."""
    found = pins_on(view, checkpoint)
    release(view, found)
    return found


def release(view: RunView, pins: Iterable[Pin]) -> None:
    """Release these pins."""
    for one in pins:
        release_pin(view.run, one)


def pins_on(view: RunView, checkpoint: Checkpoint) -> list[Pin]:
    """Return every pin that a user set on a checkpoint. Raises NotFoundError if there is none."""
    id = pinned_id(view, checkpoint)
    found = [p for p in list_pins(view.run) if (p.id, p.reason) == (id, PINNED)]
    if not found:
        raise NotFoundError(f"{checkpoint.path} is not pinned")
    return found


def lasts_until(when: str) -> datetime.timedelta:
    """Return how long from now, by a span or a moment (in local time, unless it says otherwise). Raises
    SettingsError."""
    try:
        moment = datetime.datetime.fromisoformat(when)
    except ValueError:
        try:
            lasts = datetime.timedelta(seconds=parse_span(when))
            datetime.datetime.now(datetime.UTC) + lasts  # is there such a time?
            return lasts
        except (SettingsError, OverflowError) as error:
            raise SettingsError("it is no date, time or span such as 30d") from error
    try:
        lasts = moment.astimezone() - datetime.datetime.now(datetime.UTC)
    except (OverflowError, ValueError):  # of the year 1 in some time zone
        lasts = datetime.timedelta()
    if lasts <= datetime.timedelta():
        raise SettingsError("that has passed")
    return lasts


def pinned_id(view: RunView, checkpoint: Checkpoint) -> CheckpointId:
    """Return the id that a pin on a checkpoint in place names."""
    return view.current(checkpoint) or view.history.next_id(checkpoint.series, checkpoint.step)
