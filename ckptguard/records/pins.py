"""Pins on storage: what must not be removed, by whom and until when."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Self

from msgspec.structs import asdict

from ckptguard.errors import BusyError, CkptguardError, CouldNotTellError, ObjectMissingError, RunRemovedError
from ckptguard.records.leases import NOBODY, Lease, is_past, new_lease, surely_gone, take
from ckptguard.records.run import Run, list_records, read_parsed
from ckptguard.values.ids import CheckpointId, Step, id_from_record, is_temporary
from ckptguard.values.own_log import log as _log

FOLDER = "pins"
IN_USE, PINNED = "in use", "pinned"
LONGEST_USE = datetime.timedelta(days=1)  # a process of another machine may have died without our knowing


class Pin(Lease, frozen=True, kw_only=True):
    """Why a generation must stay: `IN_USE` until its owner ends, or `PINNED`. An unreadable pin belongs to `NOBODY`.

    Pins with the same `save` were set at once, on all checkpoints of one save, and are released at once.
    """

    series: str
    step: Step
    generation: int
    reason: str
    note: str = ""
    save: str = ""

    @property
    def id(self) -> CheckpointId:
        """The id of the checkpoint."""
        return CheckpointId(self.series, self.step, self.generation)

    @property
    def words(self) -> str:
        """Why it pins, for people."""
        until = f" (until {self.until})" if self.until and self.reason == PINNED else ""
        return (f"{self.reason}: {self.note}" if self.note else self.reason) + until

    @property
    def key(self) -> str:
        """The record's key, which no other pin has."""
        return f"{FOLDER}/{self.id.record_path}/{self.token}.json"


def pin_checkpoint(
    run: Run,
    id: CheckpointId,
    *,
    reason: str = PINNED,
    lasts: datetime.timedelta | None = None,
    note: str = "",
    save: str = "",
) -> Pin:
    """Pin a generation, whether it exists or not, until the pin is released or its time is over. Raises
    StorageError."""
    pin = new_lease(Pin, lasts=lasts, **asdict(id), reason=reason, note=note, save=save)
    if not take(run, pin):
        raise BusyError(f"{id} could not be pinned")
    return pin


def release_pin(run: Run, pin: Pin) -> None:
    """Remove a pin. A missing one is no error."""
    run.records.remove(pin.key)


def list_pins(run: Run) -> list[Pin]:
    """Return every pin, whether it counts or not. An unreadable one pins the generation in its key."""
    return read_pins(run, list_records(run, FOLDER, recursive=True))


def read_pins(run: Run, keys: Iterable[str]) -> list[Pin]:
    """Return the pins at some keys below their folder; those that were released meanwhile are missing."""
    found = (_read(run, key) for key in keys)
    return [pin for pin in found if pin is not None]


def counts(run: Run, pin: Pin) -> bool:
    """True if a pin holds: its time is not over, or, for a use, its owner may still live."""
    return not (surely_gone(run, pin) if pin.reason == IN_USE else is_past(run, pin))


def pinned_generations(run: Run) -> set[CheckpointId]:
    """Return every generation that must stay."""
    return {pin.id for pin in list_pins(run) if counts(run, pin)}


class InUse:
    """Pins what a piece of work reads, until it ends. Never raises: a failure to pin is logged."""

    def __init__(self, run: Run, note: str) -> None:
        self._run, self._note = run, note
        self._pins: dict[CheckpointId, Pin | None] = {}

    def pin(self, id: CheckpointId) -> None:
        """Pin a generation, once."""
        if id in self._pins:
            return
        self._pins[id] = None
        try:
            self._pins[id] = pin_checkpoint(self._run, id, reason=IN_USE, lasts=LONGEST_USE, note=self._note)
        except RunRemovedError:
            pass  # nobody keeps it
        except CkptguardError as error:
            _log.warning("a checkpoint in use could not be pinned, so other processes may remove it: %s", error.message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pins, self._pins = self._pins, {}
        for pin in filter(None, pins.values()):
            try:
                release_pin(self._run, pin)
            except ObjectMissingError:
                pass  # it went with the records
            except CkptguardError as trouble:
                _log.warning("a pin could not be released; it ends with this process: %s", trouble.message)


def _read(run: Run, place: str) -> Pin | None:
    """Return the pin at a key below the folder; None if it is not a pin, or was released meanwhile."""
    parts = place.split("/")
    id = id_from_record(parts[0], parts[1]) if len(parts) == 3 else None
    if id is None or is_temporary(parts[2]):
        return None
    token, note = parts[2].removesuffix(".json"), "this record cannot be read"
    unreadable = Pin(**asdict(id), token=token, reason=PINNED, owner=NOBODY, since="", note=note)
    if unreadable.key != f"{FOLDER}/{place}":
        return None
    try:
        pin = read_parsed(run, unreadable.key, Pin, "a pin")
    except CouldNotTellError:
        return unreadable
    return pin if pin is None or pin.key == unreadable.key else unreadable
