"""Which process trains into a series of a run: ``trainings/<series>.json``, which ends with that process."""

from __future__ import annotations

import uuid

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError, ObjectExistsError, SettingsError
from ckptguard.records.clock import utc_now
from ckptguard.records.owners import Owner, has_ended, is_here, this_process
from ckptguard.records.run import Run, create_record, read_record
from ckptguard.values.ids import series_folder
from ckptguard.values.record_text import decode_record

FOLDER = "trainings"
_TRIES = 5


class TrainingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One guard. `loops`: it trains and saves by itself until it is released; else somebody saved with it, which says
    little about whether they will again."""

    format: int = 1
    series: str
    token: str
    owner: Owner
    loops: bool
    since: str


def begin_training(
    run: Run, series: str, *, loops: bool, before: TrainingRecord | None = None
) -> tuple[TrainingRecord, str | None]:
    """Say that this process trains into a series, in place of whoever did; returns the record, and a sentence about
    another guard that may still do so (`before` is none). SettingsError if another process of this machine surely
    does; StorageError or BusyError if nothing can be said."""
    mine = TrainingRecord(series=series, token=uuid.uuid4().hex, owner=this_process(), loops=loops, since=utc_now())
    for _ in range(_TRIES):
        other = _read(run, series)
        doubt = None
        if other is not None and (before is None or other.token != before.token):
            doubt = _doubt(run, other, mine.owner)
        if read_record(run, _key(series)) is not None:
            run.records.remove(_key(series))
        try:
            create_record(run, _key(series), msgspec.json.encode(mine) + b"\n")
            return mine, doubt
        except ObjectExistsError:
            continue  # another one begins at the same moment: see who
    raise BusyError(f"other processes begin to train into {run.url} all the time")


def end_training(run: Run, record: TrainingRecord) -> None:
    """Remove the record, if nobody took over."""
    if _read(run, record.series) == record:
        run.records.remove(_key(record.series))


def _doubt(run: Run, other: TrainingRecord, mine: Owner) -> str | None:
    owner = other.owner
    if owner == mine:
        if not other.loops:
            return None  # it may be garbage long since
        return f"another guard of this process is still open on {run.url}; this one takes over: close() that one before"
    if is_here(owner):
        if has_ended(owner):
            return None
        if not other.loops:
            return f"process {owner.pid} saved into {run.url} too, and still runs"
        raise SettingsError(
            f"process {owner.pid} trains into {run.url} already, and each would set the other's saves aside",
            hint="use another run folder, or end that process; ranks of one training call init_process_group before",
        )
    if owner.host == mine.host and owner.boot_id != mine.boot_id:
        return None  # the machine was started again
    return f"a guard of process {owner.pid} on {owner.host} may still train into {run.url} (since {other.since})"


def _key(series: str) -> str:
    return f"{FOLDER}/{series_folder(series)}.json"


def _read(run: Run, series: str) -> TrainingRecord | None:
    """The record; None if there is none that can be read."""
    try:
        record = decode_record(read_record(run, _key(series)) or b"", TrainingRecord, "a training")
    except CouldNotTellError:
        return None
    return record if record.series == series else None
