"""How the catalogue changes: all rows of one run in one transaction. After a kill it holds the rows before or after."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ckptguard.catalogue.questions import known
from ckptguard.catalogue.rows import Event, RunSeen, event_key
from ckptguard.catalogue.schema import insert
from ckptguard.values.run_rows import Generation

MOST_EVENTS = 5000  # of a run, the newest of those without a record
_WITHOUT_RECORD = ("gone", "prune", "quarantine", "replica")


def write_run(db: sqlite3.Connection, seen: RunSeen, *, now: float) -> None:
    """Replace what is known of a run, and add its new events."""
    with _transaction(db):
        run = _run_of(db, seen.id)
        before = known(db, seen.id)
        new = {row.name: row for row in seen.generations}
        for table, old, rows in (
            ("generation", before.generations, new),
            ("incident", before.incidents, {i.name: i for i in seen.incidents}),
        ):
            _replace_rows(db, table, run, old, rows)
        moved = [_moved(row, new.get(row.name), now) for row in before.generations.values() if row.in_place]
        _add_events(db, run, [*seen.events, *filter(None, moved)])
        insert(db, "curve", run, [] if seen.curve is None else [seen.curve])
        row = (seen.digest, msgspec.json.encode(seen.summary), run)
        db.execute("UPDATE run SET digest = ?, summary = ? WHERE run = ?", row)


def write_event(db: sqlite3.Connection, id: str, event: Event) -> None:
    """Add an event of a known run that leaves no record."""
    with _transaction(db):
        row = db.execute("SELECT run FROM run WHERE id = ?", (id,)).fetchone()
        if row is not None:
            _add_events(db, row[0], [event])


def forget_run(db: sqlite3.Connection, id: str) -> None:
    """Remove a run and its rows."""
    with _transaction(db):
        row = db.execute("SELECT run FROM run WHERE id = ?", (id,)).fetchone()
        if row is not None:
            for table in ("generation", "incident", "curve", "event", "run"):
                db.execute(f"DELETE FROM {table} WHERE run = ?", (row[0],))


def run_digests(db: sqlite3.Connection) -> dict[str, bytes]:
    """Return the digest of each run's rows by the run's id."""
    return dict(db.execute("SELECT id, digest FROM run"))


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _run_of(db: sqlite3.Connection, id: str) -> int:
    """Return the number of a run. An unknown one is added."""
    db.execute("INSERT OR IGNORE INTO run (id, digest, summary) VALUES (?, x'', x'')", (id,))
    (run,) = db.execute("SELECT run FROM run WHERE id = ?", (id,)).fetchone()
    return int(run)


def _replace_rows(
    db: sqlite3.Connection, table: str, run: int, old: Mapping[str, msgspec.Struct], new: Mapping[str, msgspec.Struct]
) -> None:
    gone = [(run, name) for name in old if name not in new]
    db.executemany(f"DELETE FROM {table} WHERE run = ? AND name = ?", gone)
    insert(db, table, run, [row for name, row in new.items() if old.get(name) != row])


def _add_events(db: sqlite3.Connection, run: int, events: Sequence[Event]) -> None:
    """Add what is new of these, and drop the run's oldest events without a record if there are too many. The others are
    as many as the records that they are of, and would be noted again."""
    # What is ignored takes a number all the same, and then the newest number would be that of no event.
    known = "SELECT 1 FROM event WHERE run = ? AND key = ?"
    events = [event for event in events if db.execute(known, (run, event.key)).fetchone() is None]
    insert(db, "event", run, events, otherwise="IGNORE")
    if any(event.kind in _WITHOUT_RECORD for event in events):
        which = f"run = ? AND kind IN ({', '.join('?' * len(_WITHOUT_RECORD))})"
        text = f"SELECT number FROM event WHERE {which} ORDER BY number DESC LIMIT 1 OFFSET ?"
        last = db.execute(text, (run, *_WITHOUT_RECORD, MOST_EVENTS)).fetchone()
        if last is not None:
            db.execute(f"DELETE FROM event WHERE {which} AND number <= ?", (run, *_WITHOUT_RECORD, *last))
            db.execute("UPDATE dropped SET number = max(number, ?)", last)


def _moved(before: Generation, after: Generation | None, now: float) -> Event | None:
    """Return the event of a checkpoint that is no longer in place."""
    if after is not None and after.in_place:
        return None
    kind = {"quarantine": "quarantine", "trash": "prune"}.get("" if after is None else after.aside, "gone")
    key = event_key(kind, before.name, repr(now))
    return Event(key=key, kind=kind, at=now, about=before.name, step=before.id.number, cause=before.outcome)
