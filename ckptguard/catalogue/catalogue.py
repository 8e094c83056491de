"""The catalogue in use: one thread writes, any thread asks. It is a cache, and may be deleted at any time.

While its file cannot be used, it is in memory, and begins empty. Nothing here raises or waits for the disk, except
`ask`, which waits for a second at most. What could not be written is dropped: `digest` then says that the run must be
noted again.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from ckptguard.catalogue.rows import Event, RunSeen
from ckptguard.catalogue.schema import UnusableError, delete, in_memory, open_for_reading, open_for_writing
from ckptguard.catalogue.write import forget_run, run_digests, write_event, write_run

_CHECK = 5.0  # seconds between two checks that the file is still there
_LONGEST_PAUSE = 60.0  # seconds until a catalogue that cannot be written is tried again
_MOST_WAITING = 10_000
_OPEN_SECONDS = _CLOSE_SECONDS = 2.0
_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")
_Write = Callable[[sqlite3.Connection], None]


class Catalogue:
    """The catalogue at a path, or only in memory. `tell` gets a sentence when its file cannot be used, and when it can
    be used again."""

    def __init__(self, path: str | None = None, tell: Callable[[str], None] = lambda reason: None) -> None:
        self._path, self._tell = path or "", tell
        self._lock = threading.Lock()  # for what is in memory
        self._memory: sqlite3.Connection | None = in_memory()
        self._wanted: Collection[str] | None = None  # the only runs to keep
        self._changed = threading.Condition()
        self._waiting: dict[tuple[str, ...], _Write] = {}
        self._digests: dict[str, bytes] = {}
        self._db: sqlite3.Connection | None = None
        self._files: tuple[int | None, ...] = ()
        self._doubtful = self._damaged = self._closing = self._busy = False
        self._tried = threading.Event()
        self._failures, self._told = 0, ""
        self.after_write: Callable[[], None] = lambda: None  # called in the thread that wrote; it must not raise
        self._thread = threading.Thread(target=self._run, name="catalogue", daemon=True)

    def start(self) -> None:
        """Open the catalogue's file, and write what comes, in a thread of its own."""
        self._thread.start()
        self._tried.wait(_OPEN_SECONDS)

    @property
    def is_in_file(self) -> bool:
        """True if it stays when the process ends."""
        return self._memory is None

    def digest(self, run_id: str) -> bytes:
        """Return the digest of what was last written for a run; empty if it must be noted."""
        return self._digests.get(run_id, b"")

    def see(self, seen: RunSeen) -> None:
        """Replace what is known of a run."""

        def write(db: sqlite3.Connection) -> None:
            write_run(db, seen, now=time.time())
            self._digests[seen.id] = seen.digest

        self._put(("run", seen.id), write)

    def happened(self, run_id: str, event: Event) -> None:
        """Add an event that leaves no record."""
        self._put(("event", run_id, str(event.key)), partial(write_event, id=run_id, event=event))

    def keep_only(self, run_ids: Collection[str]) -> None:
        """Remove all other runs."""
        if run_ids != self._wanted:
            self._wanted = run_ids
            self._put(("keep only",), self._forget_others)

    def _forget_others(self, db: sqlite3.Connection) -> None:
        for run_id in [id for id in self._digests if self._wanted is not None and id not in self._wanted]:
            forget_run(db, run_id)
            self._digests.pop(run_id, None)

    def ask(
        self,
        question: Callable[Concatenate[sqlite3.Connection, _Asked], _Answer],
        *args: _Asked.args,
        **named: _Asked.kwargs,
    ) -> _Answer | None:
        """Return the answer to a question of `questions`, or None if there is no catalogue now."""
        try:
            with self._lock:
                if self._memory is not None:
                    return question(self._memory, *args, **named)
            with contextlib.closing(open_for_reading(self._path)) as db:
                return question(db, *args, **named)
        except (sqlite3.Error, ValueError) as error:  # it was deleted or damaged: the writer looks
            with self._changed:
                self._doubtful, self._damaged = True, self._damaged or _is_damage(error)
                self._changed.notify_all()
            return None

    def settle(self, seconds: float) -> bool:
        """Wait until everything is written. False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, seconds)

    def close(self) -> None:
        """Write what waits, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _put(self, key: tuple[str, ...], write: _Write) -> None:
        if self._put_in_memory(write):
            self.after_write()
            return
        with self._changed:
            self._waiting.pop(key, None)  # the later one counts, and comes after what came before it
            while len(self._waiting) >= _MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[key] = write
            self._changed.notify_all()

    def _put_in_memory(self, write: _Write) -> bool:
        with self._lock:
            if self._memory is not None:
                with contextlib.suppress(sqlite3.Error, OverflowError):  # a value that cannot be stored
                    write(self._memory)
            return self._memory is not None

    def _run(self) -> None:
        while True:
            self._attempt(self._open_if_gone)
            self._tried.set()
            with self._changed:
                pause = _CHECK if not self._failures else min(2.0**self._failures, _LONGEST_PAUSE)
                self._changed.wait_for(lambda: self._closing or bool(self._waiting) or self._doubtful, pause)
                if self._closing and not self._waiting:
                    break
                waiting, self._waiting = self._waiting, {}
                self._busy = True
            while waiting and self._attempt(partial(self._write, waiting[next(iter(waiting))])):
                del waiting[next(iter(waiting))]
                self.after_write()
            with self._changed:
                self._busy = False
                self._changed.notify_all()
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()

    def _write(self, write: _Write) -> None:
        self._open_if_gone()
        if self._db is not None:
            write(self._db)

    def _attempt(self, step: Callable[[], None]) -> bool:
        """Do one step. If it fails, the catalogue is closed, and opened again later."""
        try:
            step()
        except Exception as error:
            self._shut()
            if _is_damage(error):
                with contextlib.suppress(UnusableError):
                    delete(self._path)
            self._failures += 1
            reason = f"the catalogue {self._path} cannot be used: {error}"
            if self._told != reason:
                self._told = reason
                self._tell(reason)
            return False
        if self._failures:
            self._failures, self._told = 0, ""
            self._tell(f"the catalogue {self._path} can be used again")
        return True

    def _open_if_gone(self) -> None:
        if self._db is not None and not self._doubtful and self._files == _inodes(self._path):
            return
        lost = self._db is not None and self._files != _inodes(self._path)
        damaged, self._doubtful, self._damaged = self._damaged, False, False
        self._shut()
        if damaged:
            raise sqlite3.DatabaseError("it is damaged")
        if lost:
            delete(self._path)  # what is left of it belongs to no whole catalogue
        db = open_for_writing(self._path)
        try:
            digests, self._files = run_digests(db), _inodes(self._path)
        except BaseException:
            db.close()
            raise
        with self._lock:
            self._db, self._digests, self._memory = db, digests, None
        self._forget_others(db)

    def _shut(self) -> None:
        with self._lock:
            db, self._db = self._db, None
            if self._memory is None:
                self._memory, self._digests = in_memory(), {}
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()


def _is_damage(error: Exception) -> bool:
    """True if only a new catalogue helps."""
    if isinstance(error, sqlite3.OperationalError):
        return "no such" in str(error)
    # A value that cannot be stored is no damage of what is stored.
    return type(error) is sqlite3.DatabaseError or isinstance(error, (sqlite3.IntegrityError, msgspec.MsgspecError))


def _inodes(path: str) -> tuple[int | None, ...]:
    """Return what identifies the catalogue's files. Deleting or replacing one of them changes it."""
    found: list[int | None] = []
    for suffix in ("", "-wal"):
        try:
            found.append(os.stat(path + suffix).st_ino)
        except OSError:
            found.append(None)
    return tuple(found)
