"""Leases: a record says that a process is at something now, until that ends or its owner is surely gone.

The one law: a lease whose owner may still live is never taken over, and one whose owner is surely gone holds nobody up.
No wall clock decides alone; in doubt the owner lives.
"""

from __future__ import annotations

import contextlib
import datetime
import time
import uuid
from typing import Any, ClassVar, TypeVar

import msgspec

from ckptguard.errors import ObjectExistsError, RecordsError, StorageError
from ckptguard.records.run import Run, create_record, read_record
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
from ckptguard.values.record_text import decode_record

NOBODY = Owner(host="", boot_id="", pid=0)  # of whom nothing can be known


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What every lease says: whose it is since when. `uptime` are seconds from the machine's start to `since`.

    It lasts to `until`, if there is one. A kind that is renewed states the `silence` after which an owner elsewhere is
    taken for dead: the storage's time of the record tells when it was renewed last.
    """

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


def read_lease(run: Run, key: str, kind: type[_Kind], what: str) -> _Kind | None:
    """The lease under a key, or None. RecordsError, naming `what`, if it cannot be read."""
    text = read_record(run, key)
    return None if text is None else decode_record(text, kind, what)


def take(run: Run, lease: Lease) -> bool:
    """Write a lease that must not be there yet; of several that exclude each other one gets it. StorageError."""
    try:
        create_record(run, lease.key, _text(lease))
    except ObjectExistsError:
        with contextlib.suppress(RecordsError):
            return holds(run, lease)  # the answer to a first try may have been lost on the way
        return False
    return True


def holds(run: Run, lease: Lease) -> bool:
    """Whether it is still there, and not another one in its place. CouldNotTellError."""
    found = read_lease(run, lease.key, Lease, "a lease")
    return found is not None and found.token == lease.token


def renew(run: Run, lease: Lease) -> None:
    """A sign of life. StorageError."""
    with run.records.upload(lease.key, replace=True) as upload:
        upload.write(_text(lease))
        upload.commit()


def release(run: Run, lease: Lease) -> None:
    """Give a lease up. One that is gone is no error, and another one in its place stays. CouldNotTellError."""
    if holds(run, lease):
        run.records.remove(lease.key)


def surely_gone(run: Run, lease: Lease) -> bool:
    """Whether its owner is known to be at it no more.

    Of a process that can be asked for, nothing else counts. Of one elsewhere: the lease is past its `until`, or was not
    renewed for long.
    """
    if is_here(lease.owner):
        return has_ended(lease.owner)
    return is_past(run, lease) or _is_silent(run, lease)


def is_past(run: Run, lease: Lease) -> bool:
    """Whether its `until` has come, and it lasted for as long as it was to by a clock that nobody sets: its machine's,
    or this one's since it saw the lease first. What does not say how long that is ends at `until`."""
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


def _text(lease: Lease) -> bytes:
    return msgspec.json.encode(lease) + b"\n"
