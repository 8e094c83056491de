"""What a catalogue is asked about a fleet. No question reads a run's storage, and each is answered by an index."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from ckptguard.catalogue.rows import CurveRow, Event, Known, NumberedEvent
from ckptguard.catalogue.schema import columns
from ckptguard.values.run_rows import Generation, IncidentRow
from ckptguard.values.run_summary import RunSummary

_Row = TypeVar("_Row", bound=msgspec.Struct)
_SUMMARY = msgspec.json.Decoder(RunSummary)


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """What is noted of one run: its generations in the order of their saving, its incidents, and its newest events."""

    generations: tuple[Generation, ...] = ()
    incidents: tuple[IncidentRow, ...] = ()
    events: tuple[NumberedEvent, ...] = ()


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """The events after a number. `reset`: that number is not of this catalogue, so ask for everything again.

    Ask for what comes after `last` next.
    """

    events: tuple[NumberedEvent, ...]
    last: int
    reset: bool


def summaries(db: sqlite3.Connection) -> dict[str, RunSummary]:
    """Return the summary of each run by the run's id."""
    return {id: _SUMMARY.decode(text) for id, text in db.execute("SELECT id, summary FROM run")}


def timeline(db: sqlite3.Connection, id: str, *, most: int = 1000) -> Timeline | None:
    """Return what happened in one run, at most the newest `most` events. None if there is no such run."""
    row = db.execute("SELECT run FROM run WHERE id = ?", (id,)).fetchone()
    if row is None:
        return None
    generations = sorted(_of_run(db, Generation, "generation", row[0]), key=lambda g: (g.saved_at or 0.0, g.name))
    named = ", ".join(columns(Event))
    text = f"SELECT number, {named} FROM event WHERE run = ? ORDER BY number DESC LIMIT ?"
    events = [_event(id, event) for event in db.execute(text, (row[0], most))]
    return Timeline(
        generations=tuple(generations),
        incidents=tuple(_of_run(db, IncidentRow, "incident", row[0])),
        events=tuple(reversed(events)),
    )


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


def known(db: sqlite3.Connection, id: str) -> Known:
    """Return what is known of a run."""
    row = db.execute("SELECT run, identity FROM run LEFT JOIN curve USING (run) WHERE id = ?", (id,)).fetchone()
    if row is None:
        return Known()
    actions = db.execute("SELECT key FROM event WHERE run = ? AND kind = 'action'", row[:1])
    return Known(
        generations={g.name: g for g in _of_run(db, Generation, "generation", row[0])},
        incidents={i.name: i for i in _of_run(db, IncidentRow, "incident", row[0])},
        curve=row[1] or "",
        actions=frozenset(key for (key,) in actions),
    )


def _of_run(db: sqlite3.Connection, kind: type[_Row], table: str, run: int) -> list[_Row]:
    found = db.execute(f"SELECT {', '.join(columns(kind))} FROM {table} WHERE run = ? ORDER BY name", (run,))
    return [_row(kind, row) for row in found]


def _row(kind: type[_Row], values: Sequence[Any]) -> _Row:
    return msgspec.convert(dict(zip(columns(kind), values, strict=True)), kind, strict=False)


def _event(run: str, row: Sequence[Any]) -> NumberedEvent:
    return NumberedEvent(number=row[0], run=run, event=_row(Event, row[1:]))
