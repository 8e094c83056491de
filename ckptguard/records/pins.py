"""Pins on storage: what must not be removed, by whom and until when."""

from __future__ import annotations

import datetime
import logging
import uuid
from types import TracebackType
from typing import Self

import msgspec

from ckptguard.errors import CkptguardError, CouldNotTellError
from ckptguard.records.clock import utc_now, utc_text
from ckptguard.records.elapsed import Moment, seconds_of, surely_passed, this_moment
from ckptguard.records.first_seen import seen_for
from ckptguard.records.owners import Owner, has_ended, is_here, this_process
from ckptguard.records.run import Run, create_record, list_records, read_record
from ckptguard.values.ids import CheckpointId, id_from_record, is_temporary
from ckptguard.values.record_text import decode_record

FOLDER = "pins"
IN_USE, PINNED = "in use", "pinned"
LONGEST_USE = datetime.timedelta(days=1)  # a process of another machine may have died without our knowing
_log = logging.getLogger("ckptguard")


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why a generation must stay. `reason` is `IN_USE`, which ends with its owner, or `PINNED`; `until` is
    a time, or None; `uptime` are seconds from the machine's start to when it was written. `owner` is None where the
    record cannot be read."""

    format: int = 1
    series: str
    step: int | None
    generation: int
    token: str
    reason: str
    owner: Owner | None
    since: str
    until: str | None = None
    uptime: float | None = None
    note: str = ""

    @property
    def id(self) -> CheckpointId:
        """Which checkpoint must stay."""
        return CheckpointId(self.series, self.step, self.generation)

    @property
    def key(self) -> str:
        """The record's key."""
        return f"{FOLDER}/{self.id.record_path}/{self.token}.json"


def pin_checkpoint(
    run: Run, id: CheckpointId, *, reason: str = PINNED, lasts: datetime.timedelta | None = None, note: str = ""
) -> Pin:
    """Pin a generation, whether or not it is there, until the pin is released or has lasted. StorageError."""
    until = None
    if lasts is not None:
        until = utc_text((datetime.datetime.now(datetime.UTC) + lasts).timestamp())
    pin = Pin(
        series=id.series,
        step=id.step,
        generation=id.generation,
        token=uuid.uuid4().hex,
        reason=reason,
        owner=this_process(),
        since=utc_now(),
        until=until,
        uptime=this_moment().uptime,
        note=note,
    )
    create_record(run, pin.key, msgspec.json.encode(pin) + b"\n")
    return pin


def release_pin(run: Run, pin: Pin) -> None:
    """Remove a pin; one that is gone is no error."""
    run.records.remove(pin.key)


def list_pins(run: Run) -> list[Pin]:
    """Every pin, whether or not it counts. One that cannot be read holds what its place names: in doubt nothing is
    removed."""
    found = (_read(run, key) for key in list_records(run, FOLDER, recursive=True))
    return [pin for pin in found if pin is not None]


def counts(run: Run, pin: Pin) -> bool:
    """Whether a pin holds its generation: its time has not passed, and if it is in use its owner may still live. Where
    that can be told, no clock is asked, which may be wrong."""
    if pin.reason == IN_USE and pin.owner is not None and is_here(pin.owner):
        return not has_ended(pin.owner)
    if pin.until is not None and _passed(pin.until) and _lasted(run, pin):
        return False
    return pin.reason != IN_USE or pin.owner is None or not has_ended(pin.owner)


def pinned_generations(run: Run) -> set[CheckpointId]:
    """Every generation that must stay."""
    return {pin.id for pin in list_pins(run) if counts(run, pin)}


class InUse:
    """What one piece of work reads, pinned from `pin` until the end of the work, however it ends.

    Nothing here raises: what cannot be pinned is said, and read all the same.
    """

    def __init__(self, run: Run, note: str) -> None:
        self._run, self._note = run, note
        self._pins: dict[CheckpointId, Pin | None] = {}

    def pin(self, id: CheckpointId) -> None:
        """Pin a generation, if it is not yet."""
        if id in self._pins:
            return
        self._pins[id] = None
        try:
            pin = pin_checkpoint(self._run, id, reason=IN_USE, lasts=LONGEST_USE, note=self._note)
            self._pins[id] = pin
        except CkptguardError as error:
            _log.warning("what is read now could not be pinned, others may remove it: %s", error.message)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pins, self._pins = self._pins, {}
        for pin in pins.values():
            try:
                if pin is not None:
                    release_pin(self._run, pin)
            except CkptguardError as trouble:
                _log.warning("a pin could not be released, it ends with this process: %s", trouble.message)


def _read(run: Run, place: str) -> Pin | None:
    """The pin under a key below the folder; None if it is none, or was released meanwhile."""
    folder, _, rest = place.partition("/")
    name, _, file = rest.partition("/")
    token, dot, kind = file.rpartition(".")
    id = id_from_record(folder, name)
    if id is None or (dot, kind) != (".", "json") or "/" in token or is_temporary(file):
        return None
    unreadable = Pin(
        series=id.series,
        step=id.step,
        generation=id.generation,
        token=token,
        reason=PINNED,
        owner=None,
        since="",
        note="this record cannot be read",
    )
    if unreadable.key != f"{FOLDER}/{place}":
        return None
    try:
        text = read_record(run, unreadable.key)
        if text is None:
            return None
        pin = decode_record(text, Pin, "a pin")
    except CouldNotTellError:
        return unreadable
    return pin if pin.key == unreadable.key else unreadable


def _lasted(run: Run, pin: Pin) -> bool:
    """Whether it held for as long as it was to, by a clock that nobody sets: its machine's, or from when this one saw
    it first. What does not say how long that is, is asked when it ends."""
    since, until = seconds_of(pin.since), seconds_of(pin.until or "")
    if since is None or until is None or pin.owner is None or pin.uptime is None:
        return True
    before = Moment(wall=since, host=pin.owner.host, boot_id=pin.owner.boot_id, uptime=pin.uptime)
    return max(surely_passed(before, this_moment()), seen_for(run, pin.key) or 0.0) >= until - since


def _passed(moment: str) -> bool:
    try:
        end = datetime.datetime.fromisoformat(moment)
    except ValueError:
        return False
    return end.tzinfo is not None and end < datetime.datetime.now(datetime.UTC)
