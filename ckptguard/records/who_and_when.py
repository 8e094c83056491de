"""Who did something, when, and how long ago: what can be known about other processes and machines.

Times in records are for people. A wall clock may be wrong by years, and jump, and so may a file's time. So nothing is
decided by either alone.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Collection

import msgspec

from ckptguard.errors import CouldNotTellError, SettingsError, StorageError
from ckptguard.records.run import Run, list_records, read_parsed, write_once
from ckptguard.storage.protocol import Storage, find_entry
from ckptguard.values.manifest import Manifest
from ckptguard.values.record_formats import PLAIN
from ckptguard.values.retention_policy import parse_span
from ckptguard.values.temporary_names import NOW

SIGHTINGS = "seen"  # the folder of what this machine first saw, and when
_SIGHTING = re.compile(r"[0-9a-f]{32}\.json")
_FORM = "%Y-%m-%dT%H:%M:%SZ"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A process. `namespace` is that of its pid (a container has its own). `started` is its start in clock ticks since
    the machine's start. Both are "" if the system does not report them."""

    host: str
    boot_id: str
    pid: int
    namespace: str = ""
    started: str = ""


def this_host() -> tuple[str, str]:
    """Return (host name, boot id) of this machine; the boot id is "" if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return socket.gethostname(), file.read().strip()
    except OSError:
        return socket.gethostname(), ""


def this_process() -> Owner:
    """Return the current process."""
    host, boot_id = this_host()
    pid = os.getpid()
    return Owner(host=host, boot_id=boot_id, pid=pid, namespace=_namespace(), started=_state(pid)[1])


def is_here(owner: Owner) -> bool:
    """True if this process can check the owner: same start of this machine, and same container."""
    here = (owner.host, owner.boot_id) == this_host() and owner.namespace == _namespace()
    return here and owner.boot_id != "" and 0 < owner.pid < 2**31


def has_ended(owner: Owner) -> bool:
    """True if the process has certainly ended. False if that is unknown, because it is not `is_here`."""
    if not is_here(owner):
        return False
    try:
        os.kill(owner.pid, 0)  # checks, and sends nothing
    except ProcessLookupError:
        return True
    except OSError:
        pass  # another user's, and alive
    state, started = _state(owner.pid)
    return state in ("Z", "X") or (started != "" and owner.started not in ("", started))


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, str]:
    """Return (state, start) of a process from the kernel."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # its name, before that, may hold anything
    except OSError:
        return "", ""
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def utc_now() -> str:
    """Return the current time, ISO 8601, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime(_FORM)


def dated_name() -> tuple[str, str]:
    """Return a new name, and `utc_now`. Names are sorted by time, also within a second."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%dT%H%M%S}-{now.microsecond:05x}{uuid.uuid4().hex[:3]}", now.strftime(_FORM)


def saved_at(manifest: Manifest) -> float | None:
    """Return when a checkpoint was saved. Its writer knows; an observer has only the times of its files."""
    times = [file.mtime_ns for file in manifest.files if file.mtime_ns is not None]
    if manifest.digest_origin == "writer" or not times:
        return seconds_of(manifest.sealed_at)
    return max(times) / 1e9


def utc_text(seconds: float) -> str:
    """Return seconds since 1970 in the form of `utc_now`."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime(_FORM)


def seconds_of(text: str) -> float | None:
    """Return a time of a record as seconds since 1970, or None if it is not a time."""
    try:
        moment = datetime.datetime.fromisoformat(text)
        return moment.timestamp() if moment.tzinfo is not None else None
    except (ValueError, OverflowError, OSError):
        return None


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


def storage_time(storage: Storage) -> int | None:
    """Return the time in ns that the storage gives to a new object, or None. Raises StorageError."""
    key = NOW.new()
    storage.create(key, b"")
    try:
        found = find_entry(storage, key)
        return None if found is None else found.mtime_ns
    finally:
        with contextlib.suppress(StorageError):
            storage.remove(key)


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """A moment by the wall clock (seconds since 1970), and in seconds since the machine's start."""

    wall: float
    host: str
    boot_id: str
    uptime: float


def this_moment() -> ClockReading:
    """Return the current moment."""
    host, boot_id = this_host()
    return ClockReading(wall=time.time(), host=host, boot_id=boot_id, uptime=_uptime())


def surely_passed(before: ClockReading, now: ClockReading) -> float:
    """Return the seconds that have certainly passed, by the machine's own clock, which nobody can set.

    Between two machines, or two starts, that is 0; see `passed_since`. If starts cannot be distinguished, it is by the
    wall clock, but at most since the last start.
    """
    if before.boot_id or now.boot_id:
        return max(0.0, now.uptime - before.uptime) if before.boot_id == now.boot_id else 0.0
    return max(0.0, min(now.wall - before.wall, now.uptime)) if before.host == now.host else 0.0


def stated_moment(since: str, host: str, boot_id: str, uptime: float) -> ClockReading:
    """Return the moment that a record states. With an unreadable time no time has passed."""
    wall = seconds_of(since)
    return ClockReading(wall=math.inf if wall is None else wall, host=host, boot_id=boot_id, uptime=uptime)


def passed_since(run: Run, key: str, wrote: ClockReading) -> float:
    """Return the seconds that have certainly passed since a record was written at its stated moment.

    They are by the clock of its machine, or by ours since we first saw the record.
    """
    return max(surely_passed(wrote, this_moment()), seen_for(run, key) or 0.0)


def _uptime() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # it includes sleep


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """When a machine first saw `what` (a key): by its wall clock, and in seconds since its start."""

    format: int = PLAIN.writes
    what: str
    host: str
    boot_id: str
    uptime: float
    since: str

    @property
    def key(self) -> str:
        """The record's key: each start of each machine has its own."""
        name = hashlib.sha256("\0".join((self.what, self.host, self.boot_id)).encode()).hexdigest()
        return f"{SIGHTINGS}/{name[:32]}.json"


def seen_for(run: Run, what: str, *, note: bool = False) -> float | None:
    """Return for how many seconds this machine has certainly known of it, or None. `note` records it now."""
    now = this_moment()
    here = Sighting(what=what, host=now.host, boot_id=now.boot_id, uptime=now.uptime, since=utc_text(now.wall))
    before = _sighting(run, here.key)
    if before is not None:
        return surely_passed(stated_moment(before.since, now.host, now.boot_id, before.uptime), now)
    if note:
        write_once(run, here.key, here)
        return 0.0
    return None


def forget_sightings(run: Run, keep: Collection[str]) -> None:
    """Remove sightings of everything else, from all machines. Unreadable ones go, too: they are recorded again.

    What has no name of a sighting stays: the user may have chosen a folder that had other files for the records.
    """
    for name in list_records(run, SIGHTINGS):
        key = f"{SIGHTINGS}/{name}"
        if _SIGHTING.fullmatch(name) is None:
            continue
        found = _sighting(run, key)
        if found is None or found.key != key or found.what not in keep:
            run.records.remove(key)


def _sighting(run: Run, key: str) -> Sighting | None:
    with contextlib.suppress(CouldNotTellError):
        return read_parsed(run, key, Sighting, "what was seen here")
    return None
