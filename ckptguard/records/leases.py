"""Leases: a record says that a process is at something now, until that ends or its owner is surely gone.

The one law: a lease whose owner may still live is never taken over, and one whose owner is surely gone holds nobody up.
No wall clock decides alone; in doubt the owner lives.

Two kinds are here. A claim is of who writes a checkpoint straight under its final name, where no rename can publish it
whole. A training record is of who trains into a series.
"""

from __future__ import annotations

import contextlib
import datetime
import time
import uuid
from typing import Any, ClassVar, TypeVar

import msgspec

from ckptguard.errors import (
    BusyError,
    CouldNotTellError,
    ObjectExistsError,
    RecordsError,
    SettingsError,
    StorageError,
)
from ckptguard.records.run import Run, as_line, create_record, list_records, read_parsed, read_record
from ckptguard.records.who_and_when import (
    Owner,
    has_ended,
    is_here,
    passed_since,
    seconds_of,
    stated_moment,
    storage_time,
    this_moment,
    this_process,
    utc_text,
)
from ckptguard.values.ids import is_safe_path, series_folder

CLAIMS, TRAININGS = "saving", "trainings"  # their folders
RENEWED = 60.0  # seconds between the signs of life of a claim's owner
_TRIES = 5  # to begin a training while others do
NOBODY = Owner(host="", boot_id="", pid=0)  # of whom nothing can be known


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What every lease says: whose it is since when, and until when it lasts, if there is an end. `uptime` are seconds
    from the machine's start to `since`. A kind that is renewed states the `silence` after which an owner elsewhere is
    taken for dead, by the storage's time of the record."""

    silence: ClassVar[float | None] = None  # seconds

    format: int = 1
    token: str
    owner: Owner
    since: str
    until: str | None = None
    uptime: float | None = None

    @property
    def key(self) -> str:
        """The record's key. Leases that exclude each other have the same one."""
        raise NotImplementedError


_Kind = TypeVar("_Kind", bound=Lease)


def new_lease(kind: type[_Kind], *, lasts: datetime.timedelta | None = None, **what: Any) -> _Kind:
    """A lease of this process, from now on for as long as it `lasts`, of what its kind holds; nothing is written."""
    now = this_moment()
    since = utc_text(now.wall)
    until = None if lasts is None else utc_text(now.wall + lasts.total_seconds())  # by one look at the clock
    token, owner = uuid.uuid4().hex, this_process()
    return kind(token=token, owner=owner, since=since, until=until, uptime=now.uptime, **what)


def take(run: Run, lease: Lease) -> bool:
    """Write a lease that must not be there yet; of several that exclude each other one gets it. StorageError."""
    try:
        create_record(run, lease.key, lease)
    except ObjectExistsError:
        with contextlib.suppress(RecordsError):
            return holds(run, lease)  # the answer to a first try may have been lost on the way
        return False
    return True


def holds(run: Run, lease: Lease) -> bool:
    """True if it is still there, and not another one in its place. CouldNotTellError."""
    found = read_parsed(run, lease.key, Lease, "a lease")
    return found is not None and found.token == lease.token


def renew(run: Run, lease: Lease) -> None:
    """A sign of life. StorageError."""
    with run.records.upload(lease.key, replace=True) as upload:
        upload.write(as_line(lease))
        upload.commit()


def release(run: Run, lease: Lease) -> None:
    """Give a lease up. One that is gone is no error, and another one in its place stays. CouldNotTellError."""
    if holds(run, lease):
        run.records.remove(lease.key)


def surely_gone(run: Run, lease: Lease) -> bool:
    """True if its owner is known to be at it no more: asked for where that can be, else past `until` or long silent."""
    if is_here(lease.owner):
        return has_ended(lease.owner)
    return is_past(run, lease) or _is_silent(run, lease)


def is_past(run: Run, lease: Lease) -> bool:
    """True if its `until` has come, and it lasted as long by a clock that nobody sets. That is its machine's, or this
    one's since it saw the lease first. What does not say how long it lasts ends at `until`."""
    since, until = seconds_of(lease.since), seconds_of(lease.until or "")
    if until is None or until >= time.time():
        return False
    if since is None or lease.uptime is None:
        return True
    began = stated_moment(lease.since, lease.owner.host, lease.owner.boot_id, lease.uptime)
    return passed_since(run, lease.key, began) >= until - since


def _is_silent(run: Run, lease: Lease) -> bool:
    """By the storage's own clock: those of two machines cannot be compared."""
    if lease.silence is None:
        return False
    try:
        renewed = run.records.stat(lease.key).mtime_ns
        now = storage_time(run.records)
    except StorageError:
        return False
    return renewed is not None and now is not None and (now - renewed) / 1e9 > lease.silence


class Claim(Lease, frozen=True, kw_only=True):
    """`path` is being written, as this generation of this step. It counts as long as its owner lives."""

    silence: ClassVar[float | None] = 900.0

    path: str
    series: str
    step: int
    generation: int

    @property
    def key(self) -> str:
        """The record's key: one for each path."""
        return f"{CLAIMS}/{self.path}.json"


def claim_path(run: Run, *, path: str, series: str, step: int, generation: int) -> Claim:
    """Claim a path; of racing writers one gets it, and the others BusyError, which names it."""
    claim = new_lease(Claim, path=path, series=series, step=step, generation=generation)
    if not take(run, claim):
        other = read_claim(run, path)
        who = f"process {other.owner.pid} on {other.owner.host}, since {other.since}" if other else "another process"
        raise BusyError(f"{path} is being written by {who}")
    return claim


def read_claim(run: Run, path: str) -> Claim | None:
    """The claim of a path, or None. RecordsError if it cannot be read."""
    return read_parsed(run, f"{CLAIMS}/{path}.json", Claim, "a claim")


def list_claims(run: Run) -> list[Claim]:
    """Every claim that can be read, of the path that its place says."""
    found = []
    for name in list_records(run, CLAIMS):
        path = name.removesuffix(".json")
        if path == name or not is_safe_path(path):
            continue
        with contextlib.suppress(CouldNotTellError):
            claim = read_claim(run, path)
            if claim is not None and claim.path == path:
                found.append(claim)
    return found


class TrainingRecord(Lease, frozen=True, kw_only=True):
    """One guard. `loops`: it trains and saves by itself until it is released; else somebody just saved with it."""

    series: str
    loops: bool

    @property
    def key(self) -> str:
        """The record's key: one for each series."""
        return f"{TRAININGS}/{series_folder(self.series)}.json"


def begin_training(
    run: Run, series: str, *, loops: bool, before: TrainingRecord | None = None
) -> tuple[TrainingRecord, str | None]:
    """Say that this process trains into a series, in place of whoever did; returns the record, and a sentence about
    another guard (not `before`) that may still do so. SettingsError if another process of this machine surely does;
    StorageError or BusyError if nothing can be said."""
    mine = new_lease(TrainingRecord, series=series, loops=loops)
    for _ in range(_TRIES):
        other, doubt = None, None
        with contextlib.suppress(CouldNotTellError):
            other = read_parsed(run, mine.key, TrainingRecord, "a training")
        if other is not None and other.series == series and (before is None or other.token != before.token):
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
