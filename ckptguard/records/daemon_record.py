"""The daemon that guards a run: ``daemon.json``, a hint that its reader must check (host, boot, socket)."""

from __future__ import annotations

import contextlib
import socket

import msgspec

from ckptguard.errors import CouldNotTellError, ObjectMissingError
from ckptguard.records.run import Run, begin_records_elsewhere, read_parsed, write_once
from ckptguard.records.who_and_when import Owner, has_ended, this_host, this_process
from ckptguard.values.record_formats import PLAIN

KEY = "daemon.json"
_SECONDS = 1.0  # for a daemon to take a connection


class DaemonRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The address (a Unix socket's path) of the daemon, and the host and boot for which it is valid."""

    format: int = PLAIN.writes
    address: str
    host: str
    boot_id: str
    pid: int
    started_at: str


def write_daemon_record(run: Run, record: DaemonRecord) -> None:
    """Record that this daemon guards the run, instead of any other one."""
    begin_records_elsewhere(run)
    for _ in range(5):
        with contextlib.suppress(ObjectMissingError):  # no record was ever written
            run.records.remove(KEY)
        if write_once(run, KEY, record):
            return  # otherwise another daemon starts at the same moment; either may stay


def read_daemon_record(run: Run) -> DaemonRecord | None:
    """Return the record, or None if there is none that can be read."""
    with contextlib.suppress(CouldNotTellError):
        return read_parsed(run, KEY, DaemonRecord, KEY)
    return None


def clear_daemon_record(run: Run, record: DaemonRecord) -> None:
    """Remove the record if it is still this daemon's."""
    if read_daemon_record(run) == record:
        with contextlib.suppress(ObjectMissingError):
            run.records.remove(KEY)


def surely_ended(record: DaemonRecord) -> bool:
    """Whether that daemon is known to run no more. One of another machine, or of another container, may."""
    host, boot_id = this_host()
    if record.host == host and record.boot_id != boot_id:
        return True  # the machine was started again
    namespace = this_process().namespace
    return has_ended(Owner(host=record.host, boot_id=record.boot_id, pid=record.pid, namespace=namespace))


def answers(record: DaemonRecord) -> bool:
    """Whether that daemon takes connections on this machine."""
    if (record.host, record.boot_id) != this_host():
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_SECONDS)
            connection.connect(record.address)
    except (OSError, ValueError, AttributeError):  # none, a path that is none, a system without such sockets
        return False
    return True
