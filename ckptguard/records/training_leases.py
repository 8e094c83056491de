"""Which process trains into a series of a run: ``trainings/<series>.json``, which ends with that process."""

from __future__ import annotations

import contextlib

from ckptguard.errors import BusyError, CouldNotTellError, RecordsError, SettingsError
from ckptguard.records.leases import Lease, new_lease, read_lease, release, surely_gone, take
from ckptguard.records.run import Run, read_record
from ckptguard.records.who_and_when import Owner, is_here
from ckptguard.values.ids import series_folder

FOLDER = "trainings"
_TRIES = 5


class TrainingRecord(Lease, frozen=True, kw_only=True):
    """One guard. `loops`: it trains and saves by itself until it is released; else somebody saved with it, which says
    little about whether they will again."""

    series: str
    loops: bool

    @property
    def key(self) -> str:
        """The record's key: one for each series."""
        return f"{FOLDER}/{series_folder(self.series)}.json"


def begin_training(
    run: Run, series: str, *, loops: bool, before: TrainingRecord | None = None
) -> tuple[TrainingRecord, str | None]:
    """Say that this process trains into a series, in place of whoever did; returns the record, and a sentence about
    another guard that may still do so (`before` is none). SettingsError if another process of this machine surely
    does; StorageError or BusyError if nothing can be said."""
    mine = new_lease(TrainingRecord, series=series, loops=loops)
    for _ in range(_TRIES):
        other, doubt = _read(run, mine), None
        if other is not None and (before is None or other.token != before.token):
            doubt = _doubt(run, other, mine.owner)
        if read_record(run, mine.key) is not None:
            run.records.remove(mine.key)
        if take(run, mine):
            return mine, doubt
        # else another one begins at the same moment: see who
    raise BusyError(f"other processes begin to train into {run.url} all the time")


def end_training(run: Run, record: TrainingRecord) -> None:
    """Remove the record, if nobody took over."""
    with contextlib.suppress(RecordsError):
        release(run, record)


def _doubt(run: Run, other: TrainingRecord, mine: Owner) -> str | None:
    owner = other.owner
    if owner == mine:
        if not other.loops:
            return None  # it may be garbage long since
        return f"another guard of this process is still open on {run.url}; this one takes over: close() that one before"
    if surely_gone(run, other) or (owner.host == mine.host and owner.boot_id != mine.boot_id):
        return None  # or the machine was started again
    if not is_here(owner):
        return f"a guard of process {owner.pid} on {owner.host} may still train into {run.url} (since {other.since})"
    if not other.loops:
        return f"process {owner.pid} saved into {run.url} too, and still runs"
    raise SettingsError(
        f"process {owner.pid} trains into {run.url} already, and each would set the other's saves aside",
        hint="use another run folder, or end that process; ranks of one training call init_process_group before",
    )


def _read(run: Run, mine: TrainingRecord) -> TrainingRecord | None:
    """The record in its place; None if there is none that can be read."""
    try:
        record = read_lease(run, mine.key, TrainingRecord, "a training")
    except CouldNotTellError:
        return None
    return record if record is not None and record.series == mine.series else None
