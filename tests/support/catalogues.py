"""A catalogue that is written at once, and whose writer may be killed before any of its statements."""

from __future__ import annotations

import math
import sqlite3
import time
from typing import Any

from ckptguard.catalogue.rows import CurveRow, Event, RunSeen
from ckptguard.catalogue.schema import columns, open_for_writing
from ckptguard.catalogue.write import run_digests, write_event, write_run
from ckptguard.values.run_rows import Generation, IncidentRow
from support.kill_points import Killed

# What must be the same however a catalogue came about. An event's number and what leaves no record may differ.
_GENERATION = ", ".join(f"generation.{name}" for name in columns(Generation))
_INCIDENT = ", ".join(f"incident.{name}" for name in columns(IncidentRow))
_CURVE = ", ".join(f"curve.{name}" for name in columns(CurveRow))
ROWS = (
    "SELECT id, digest, summary FROM run ORDER BY id",
    f"SELECT id, {_GENERATION} FROM generation JOIN run USING (run) ORDER BY id, name",
    f"SELECT id, {_INCIDENT} FROM incident JOIN run USING (run) ORDER BY id, name",
    f"SELECT id, {_CURVE} FROM curve JOIN run USING (run) WHERE identity != '' ORDER BY id",
    "SELECT id, key, kind, at, about, step, cause, text FROM event JOIN run USING (run)"
    " WHERE kind IN ('verdict', 'incident', 'rollback', 'action') ORDER BY id, key",
)


class Mortal:
    """A connection that is killed before its n-th statement, and then answers none."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.left: float = math.inf

    def execute(self, *args: Any) -> Any:
        """Run a statement."""
        self._live()
        return self._db.execute(*args)

    def executemany(self, *args: Any) -> Any:
        """Run a statement with each of some values."""
        self._live()
        return self._db.executemany(*args)

    def _live(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


class PromptCatalogue:
    """What a feed needs of a catalogue, without its thread."""

    is_in_file = True

    def __init__(self, path: str) -> None:
        self._path = path
        self.restart()

    def restart(self) -> None:
        """Begin as a new process does."""
        self._real = open_for_writing(self._path)
        self.db = Mortal(self._real)

    def kill(self) -> None:
        """Lose what was not committed, and begin again."""
        self._real.close()
        self.restart()

    def digest(self, run_id: str) -> bytes:
        """That of the last rows."""
        return run_digests(self._real).get(run_id, b"")

    def see(self, seen: RunSeen) -> None:
        """Write now."""
        write_run(self.db, seen, now=time.time())  # type: ignore[arg-type]

    def happened(self, run_id: str, event: Event) -> None:
        """Write now."""
        write_event(self.db, run_id, event)  # type: ignore[arg-type]

    def ask(self, question: Any, *args: Any, **named: Any) -> Any:
        """Answer from the same connection."""
        return question(self._real, *args, **named)

    def rows(self) -> list[list[tuple[Any, ...]]]:
        """All rows that must be equal to those of any other catalogue of the same runs."""
        return [[tuple(v for v in row) for row in self._real.execute(text)] for text in ROWS]

    def close(self) -> None:
        """Let go of the file."""
        self._real.close()
