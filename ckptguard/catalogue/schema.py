"""The catalogue's file: how it is made, opened and refused."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec

from ckptguard.catalogue.rows import CurveRow, Event
from ckptguard.storage.local.mounts import mount_of
from ckptguard.storage.runtime_folder import require_private
from ckptguard.values.run_rows import Generation, IncidentRow

BUSY_SECONDS = 1.0
_NETWORKS = re.compile(r"nfs|cifs|smb|lustre|gpfs|beegfs|ceph|gluster|afs|9p|fuse|wekafs|pvfs|orangefs|ncpfs|sshfs")
_TYPES = {"str": "TEXT", "int": "INTEGER", "bool": "INTEGER", "float": "REAL", "bytes": "BLOB"}


class UnusableError(Exception):
    """There can be no catalogue at this path. The text says why."""


@functools.cache
def columns(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the columns of a kind of rows."""
    return tuple(field.name for field in msgspec.structs.fields(kind))


def _declared(kind: type[msgspec.Struct]) -> str:
    stated = kind.__annotations__
    return ", ".join(f"{name} {_TYPES[str(stated[name]).split(' ')[0]]}" for name in columns(kind))


# `run` is short for the run's id: its rowid, so that a million rows stay small.
_TABLES = (
    "CREATE TABLE run (run INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digest BLOB, summary BLOB)",
    f"CREATE TABLE generation (run INTEGER NOT NULL, {_declared(Generation)}, PRIMARY KEY (run, name)) WITHOUT ROWID",
    f"CREATE TABLE incident (run INTEGER NOT NULL, {_declared(IncidentRow)}, PRIMARY KEY (run, name)) WITHOUT ROWID",
    f"CREATE TABLE curve (run INTEGER PRIMARY KEY, {_declared(CurveRow)})",
    f"CREATE TABLE event (number INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL, {_declared(Event)})",
    "CREATE UNIQUE INDEX event_key ON event (run, key)",
    "CREATE TABLE dropped (number INTEGER)",  # the highest number of an event that had to go
)
VERSION = zlib.crc32("".join(_TABLES).encode()) >> 1  # a file with other tables is made anew


def open_for_writing(path: str) -> sqlite3.Connection:
    """Open the catalogue, and make it if there is none. One that is damaged or of another version is made anew.

    Raises UnusableError, or sqlite3.Error if it is locked.
    """
    try:
        require_private(os.path.dirname(path))
    except OSError as error:
        raise UnusableError(f"its folder cannot be used: {error.strerror or error}") from error
    kind = mount_of(os.path.realpath(os.path.dirname(path)))[1]
    if _NETWORKS.match(kind):
        raise UnusableError(f"{path} is on a network file system ({kind}), where its locks cannot be trusted")
    try:
        return _opened(path)
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "readonly" in str(error) or "unable to open" in str(error):
            raise
    except sqlite3.DatabaseError:
        pass
    delete(path)
    return _opened(path)


def _opened(path: str) -> sqlite3.Connection:
    with contextlib.suppress(FileExistsError):  # opening one that exists would drop the locks of this process on it
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")  # a cache: the last commits may be lost with the machine
        connection.execute("PRAGMA trusted_schema = OFF")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != VERSION or connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() != (0,):
                raise sqlite3.DatabaseError("another version")
            _make(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _make(connection: sqlite3.Connection) -> None:
    # Numbers go on above those of a deleted catalogue, so that no reader takes new events for old ones.
    first = int(time.time() * 1e6)
    connection.execute("BEGIN IMMEDIATE")
    for statement in _TABLES:
        connection.execute(statement)
    connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('event', ?)", (first,))
    connection.execute("INSERT INTO dropped VALUES (0)")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def in_memory() -> sqlite3.Connection:
    """Return an empty catalogue without a file."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _make(connection)
    return connection


def open_for_reading(path: str) -> sqlite3.Connection:
    """Open the catalogue for questions. Raises sqlite3.Error if there is none."""
    place = Path(path).absolute().as_uri()
    connection = sqlite3.connect(
        f"{place}?mode=ro", uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA query_only = ON")
    return connection


def delete(path: str) -> None:
    """Delete the catalogue. Raises UnusableError."""
    for suffix in ("", "-wal", "-shm"):
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + suffix)
        except OSError as error:
            raise UnusableError(f"{path} is damaged and cannot be deleted: {error.strerror}") from error


def insert(connection: sqlite3.Connection, table: str, run: int, rows: Any, *, otherwise: str = "REPLACE") -> None:
    """Insert rows of one kind for a run."""
    rows = list(rows)
    if rows:
        kind: type[msgspec.Struct] = type(rows[0])
        named = ["run", *columns(kind)]
        marks = ", ".join("?" * len(named))
        text = f"INSERT OR {otherwise} INTO {table} ({', '.join(named)}) VALUES ({marks})"
        connection.executemany(text, [(run, *msgspec.structs.astuple(row)) for row in rows])
