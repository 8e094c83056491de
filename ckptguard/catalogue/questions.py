"""What a catalogue is asked about a fleet. No question reads a run's storage, and each is answered by an index."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from ckptguard.catalogue.rows import CurveRow, Event, Generation, IncidentRow, NumberedEvent
from ckptguard.catalogue.schema import columns
from ckptguard.decisions.fleet_health import is_training
from ckptguard.values.run_facts import RunFacts

_Row = TypeVar("_Row", bound=msgspec.Struct)
_FACTS = msgspec.json.Decoder(RunFacts)


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `number` is its place in the catalogue, to go on behind it."""

    number: int
    id: str
    facts: RunFacts


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its generations in the order of their saving, its incidents, and its events."""

    run: ListedRun
    generations: tuple[Generation, ...]
    incidents: tuple[IncidentRow, ...]
    events: tuple[NumberedEvent, ...]


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """The events after a number. `reset`: that number is not of this catalogue, so ask for everything again.

    Ask for what comes after `last` next.
    """

    events: tuple[NumberedEvent, ...]
    last: int
    reset: bool


def runs(db: sqlite3.Connection, *, now: float, after: int = 0, most: int = 100) -> list[ListedRun]:
    """Return the runs behind a number, in the order in which they came."""
    found = db.execute("SELECT run, id, facts FROM run WHERE run > ? ORDER BY run LIMIT ?", (after, most))
    return [_listed(row, now) for row in found]


def one_run(db: sqlite3.Connection, id: str, *, now: float) -> ListedRun | None:
    """Return one run, or None."""
    row = db.execute("SELECT run, id, facts FROM run WHERE id = ?", (id,)).fetchone()
    return None if row is None else _listed(row, now)


def timeline(db: sqlite3.Connection, id: str, *, now: float, most: int = 1000) -> Timeline | None:
    """Return what happened in one run, at most the newest `most` events. None if there is no such run."""
    run = one_run(db, id, now=now)
    if run is None:
        return None
    generations = sorted(_of_run(db, Generation, "generation", run.number), key=lambda g: (g.saved_at or 0.0, g.name))
    named = ", ".join(columns(Event))
    text = f"SELECT number, {named} FROM event WHERE run = ? ORDER BY number DESC LIMIT ?"
    events = [_event(id, row) for row in db.execute(text, (run.number, most))]
    return Timeline(
        run=run,
        generations=tuple(generations),
        incidents=tuple(_of_run(db, IncidentRow, "incident", run.number)),
        events=tuple(reversed(events)),
    )


def action_keys(db: sqlite3.Connection, id: str) -> frozenset[int]:
    """Return the keys of a run's events of actions."""
    found = db.execute("SELECT key FROM event JOIN run USING (run) WHERE id = ? AND kind = 'action'", (id,))
    return frozenset(key for (key,) in found)


def curve_identity(db: sqlite3.Connection, id: str) -> str:
    """Return from what the known curve of a run was made; empty if none is known."""
    row = db.execute("SELECT identity FROM curve JOIN run USING (run) WHERE id = ?", (id,)).fetchone()
    return "" if row is None else str(row[0])


def curve(db: sqlite3.Connection, id: str) -> tuple[CurveRow, tuple[IncidentRow, ...]]:
    """Return the curve of a run, and its incidents."""
    named = ", ".join(f"curve.{name}" for name in columns(CurveRow))
    row = db.execute(f"SELECT run, {named} FROM run LEFT JOIN curve USING (run) WHERE id = ?", (id,)).fetchone()
    if row is None or row[1] is None:
        return CurveRow(), () if row is None else tuple(_of_run(db, IncidentRow, "incident", row[0]))
    return _row(CurveRow, row[1:]), tuple(_of_run(db, IncidentRow, "incident", row[0]))


def events_after(db: sqlite3.Connection, number: int, *, most: int = 1000) -> EventPage:
    """Return the events after a number, oldest first. Begin with 0."""
    named = ", ".join(f"event.{name}" for name in columns(Event))
    text = f"SELECT id, number, {named} FROM event JOIN run USING (run) WHERE number > ? ORDER BY number LIMIT ?"
    events = tuple(_event(id, row) for id, *row in db.execute(text, (number, most)))
    (newest,) = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'event'").fetchone()
    first, dropped = db.execute("SELECT (SELECT min(number) FROM event), number FROM dropped").fetchone()
    oldest = max(newest if first is None else first - 1, dropped)
    reset = number != 0 and not oldest <= number <= newest
    return EventPage(
        events=() if reset else events, last=events[-1].number if events and not reset else newest, reset=reset
    )


def known_rows(db: sqlite3.Connection, id: str) -> tuple[bytes, dict[str, Generation], dict[str, IncidentRow]]:
    """Return the digest of a run's rows, and the rows by their names; nothing for an unknown run."""
    row = db.execute("SELECT run, digest FROM run WHERE id = ?", (id,)).fetchone()
    if row is None:
        return b"", {}, {}
    generations = {g.name: g for g in _of_run(db, Generation, "generation", row[0])}
    return row[1], generations, {i.name: i for i in _of_run(db, IncidentRow, "incident", row[0])}


def _of_run(db: sqlite3.Connection, kind: type[_Row], table: str, run: int) -> list[_Row]:
    found = db.execute(f"SELECT {', '.join(columns(kind))} FROM {table} WHERE run = ? ORDER BY name", (run,))
    return [_row(kind, row) for row in found]


def _row(kind: type[_Row], values: Sequence[Any]) -> _Row:
    return msgspec.convert(dict(zip(columns(kind), values, strict=True)), kind, strict=False)


def _event(run: str, row: Sequence[Any]) -> NumberedEvent:
    return NumberedEvent(number=row[0], run=run, event=_row(Event, row[1:]))


def _listed(row: Sequence[Any], now: float) -> ListedRun:
    number, id, text = row
    facts = _FACTS.decode(text)
    training = is_training(now, facts.newest_at, facts.save_interval)
    return ListedRun(number=number, id=id, facts=msgspec.structs.replace(facts, training=training))
