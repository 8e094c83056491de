"""Leases: a record that a process is doing something, until that ends or its owner has certainly ended.

The one law: a lease whose owner may still live is never taken over, and one whose owner has certainly ended blocks
nobody. No wall clock decides alone; in doubt the owner lives.

There are two kinds. A claim belongs to the writer of a checkpoint at its final path, where no rename can publish it. A
training record belongs to a process that trains into a series.
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
from ckptguard.records.run import (
    Run,
    begin_records_elsewhere,
    create_record,
    list_records,
    read_parsed,
    read_record,
    read_sound,
    replace_record,
)
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
from ckptguard.values.record_formats import PLAIN

CLAIMS, TRAININGS = "saving", "trainings"  # their folders
RENEWED = 60.0  # seconds between the renewals of a claim
_TRIES = 5  # attempts to begin a training while others do
NOBODY = Owner(host="", boot_id="", pid=0)  # an owner that cannot be known


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What every lease says: its owner, when it began, and when it ends, if ever.

    `uptime` is the seconds from the machine's start to `since`. A renewable kind has a `silence`: after that time by
    the storage's clock, an owner elsewhere counts as dead.
    """

    silence: ClassVar[float | None] = None  # seconds

    format: int = PLAIN.writes
    token: str
    owner: Owner
    since: str
    until: str | None = None
    uptime: float | None = None

    @property
    def key(self) -> str:
        """The record's key. Leases that exclude each other have the same key."""
        raise NotImplementedError


_Kind = TypeVar("_Kind", bound=Lease)


def new_lease(kind: type[_Kind], *, lasts: datetime.timedelta | None = None, **what: Any) -> _Kind:
    """Return a lease of this process from now on, with the fields of its kind. Nothing is written."""
    now = this_moment()
    since = utc_text(now.wall)
    until = None if lasts is None else utc_text(now.wall + lasts.total_seconds())  # from the same reading of the clock
    token, owner = uuid.uuid4().hex, this_process()
    return kind(token=token, owner=owner, since=since, until=until, uptime=now.uptime, **what)


def take(run: Run, lease: Lease) -> bool:
    """Write a lease that must not exist yet. Of several that exclude each other one succeeds. Raises StorageError."""
    try:
        create_record(run, lease.key, lease)
    except ObjectExistsError:
        with contextlib.suppress(RecordsError):
            return holds(run, lease)  # the answer to a first attempt may have been lost
        return False
    return True


def holds(run: Run, lease: Lease) -> bool:
    """True if it still exists, and was not replaced by another one. Raises CouldNotTellError."""
    now = msgspec.structs.replace(run, records=run.records.now())
    found = read_parsed(now, lease.key, Lease, "a lease")
    return found is not None and found.token == lease.token


def renew(run: Run, lease: Lease) -> None:
    """Renew a lease. Raises StorageError."""
    replace_record(run, lease.key, lease)


def release(run: Run, lease: Lease) -> None:
    """Give a lease up. A missing one is no error, and another one in its place stays. Raises CouldNotTellError."""
    if holds(run, lease):
        run.records.remove(lease.key)


def surely_gone(run: Run, lease: Lease) -> bool:
    """True if its owner is certainly no longer working on it.

    On this machine the process is checked. Elsewhere the lease must be past `until`, or silent for long.
    """
    if is_here(lease.owner):
        return has_ended(lease.owner)
    return is_past(run, lease) or _is_silent(run, lease)


def is_past(run: Run, lease: Lease) -> bool:
    """True if `until` has passed, and also its duration by a clock that nobody can set.

    That is the clock of its machine, or ours since we first saw the lease. Without a known duration it ends at `until`.
    """
    since, until = seconds_of(lease.since), seconds_of(lease.until or "")
    if until is None or until >= time.time():
        return False
    if since is None or lease.uptime is None:
        return True
    began = stated_moment(lease.since, lease.owner.host, lease.owner.boot_id, lease.uptime)
    return passed_since(run, lease.key, began) >= until - since


def _is_silent(run: Run, lease: Lease) -> bool:
    """True if it was not renewed for long by the storage's own clock: clocks of two machines cannot be compared."""
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
    """Claim a path. Of several writers one succeeds; the others get BusyError, which names it."""
    claim = new_lease(Claim, path=path, series=series, step=step, generation=generation)
    if not take(run, claim):
        other = read_claim(run, path)
        who = f"process {other.owner.pid} on {other.owner.host}, since {other.since}" if other else "another process"
        raise BusyError(f"{path} is being written by {who}")
    return claim


def read_claim(run: Run, path: str) -> Claim | None:
    """Return the claim of a path, or None. Raises RecordsError if it cannot be read."""
    return read_parsed(run, f"{CLAIMS}/{path}.json", Claim, "a claim")


def list_claims(run: Run) -> list[Claim]:
    """Return every readable claim whose path fits its place."""
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
    """One guard. `loops`: it trains and saves until it is released; otherwise it only made single saves."""

    series: str
    loops: bool

    @property
    def key(self) -> str:
        """The record's key: one for each series."""
        return f"{TRAININGS}/{series_folder(self.series)}.json"


def list_trainings(run: Run) -> list[TrainingRecord]:
    """Return every readable record of a training."""
    found = (
        read_sound(run, f"{TRAININGS}/{name}", TrainingRecord, "a training") for name in list_records(run, TRAININGS)
    )
    return [record for record in found if record is not None]


def begin_training(
    run: Run, series: str, *, loops: bool, before: TrainingRecord | None = None
) -> tuple[TrainingRecord, str | None]:
    """Record that this process trains into a series, instead of any other one. Returns the record.

    The sentence, if any, is about another guard (not `before`) that may still train.

    Raises:
        SettingsError: another process of this machine certainly trains.
        StorageError, BusyError: nothing could be recorded.
    """
    begin_records_elsewhere(run)
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
        # otherwise another one begins at the same moment: see who
    raise BusyError(f"other processes keep starting to train into {run.url}; start only one training per run")


def end_training(run: Run, record: TrainingRecord) -> None:
    """Remove the record, unless another process took over."""
    with contextlib.suppress(RecordsError):
        release(run, record)


def _doubt(run: Run, other: TrainingRecord, mine: Owner) -> str | None:
    owner = other.owner
    if owner == mine:
        if not other.loops:
            return None  # it may be garbage by now
        return (
            f"another guard of this process is still open on {run.url}; this one takes over, so close() that one first"
        )
    if surely_gone(run, other) or (owner.host == mine.host and owner.boot_id != mine.boot_id):
        return None  # or the machine was restarted
    if not is_here(owner):
        return f"a guard of process {owner.pid} on {owner.host} may still train into {run.url} (since {other.since})"
    if not other.loops:
        return f"process {owner.pid} also saved into {run.url}, and is still running"
    raise SettingsError(
        f"process {owner.pid} is already training into {run.url}, and each would quarantine the other's saves",
        hint="use another run folder, or end that process; ranks of one training must call init_process_group first",
    )
