"""The catalogue of a daemon's runs: what is noted of each, packed in memory, and in one file for each run.

It is a cache. A file may be deleted at any time: what it held is in memory, or is read from the records again. One that
is damaged or of another version counts as none.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from ckptguard.catalogue.rows import Event, Noted, NumberedEvent, RunSeen, event_key
from ckptguard.storage.local.writes import replace_file
from ckptguard.storage.runtime_folder import read_private
from ckptguard.values.record_text import decodable
from ckptguard.values.run_rows import Generation
from ckptguard.values.run_summary import RunSummary
from ckptguard.version import __version__

MOST_RECENT = 256  # events of all runs that a reader may have missed
MOST_EVENTS = 5000  # of a run, the newest of those without a record
_WITHOUT_RECORD = ("gone", "prune", "quarantine", "replica")
_LARGEST = 64 << 20  # bytes of a file


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """The content of one run's file."""

    version: str
    id: str
    digest: bytes
    summary: RunSummary
    noted: Noted


class _Held(NamedTuple):
    """What is in memory of one run. `packed` is the content of its file."""

    digest: bytes = b""
    summary: RunSummary | None = None
    packed: bytes = b""


class _Recent(NamedTuple):
    """The newest events of all runs: all that came after the number `oldest`, up to `newest`."""

    events: tuple[NumberedEvent, ...]
    oldest: int
    newest: int


class KnownRun(NamedTuple):
    """A run that was guarded, its name, and the mount point of its folder then, if it is a local one."""

    url: str
    name: str
    was_on: str | None


class EventPage(NamedTuple):
    """The events after a number. `reset`: some of them are not known any more, so ask for everything again. Ask for
    what comes after `last` next."""

    events: tuple[NumberedEvent, ...]
    last: int
    reset: bool


class Catalogue:
    """The catalogue in a folder, or only in memory. Any thread may use it.

    `tell` gets a sentence when its files cannot be written, and when they can be written again.
    """

    def __init__(self, folder: str | None = None, tell: Callable[[str], None] = lambda reason: None) -> None:
        self._folder, self._tell = folder, tell
        self._changing = threading.RLock()
        self._held: dict[str, _Held] = {}
        # Numbers go on above those of an earlier process, so that no reader takes new events for old ones.
        began = int(time.time() * 1e6)
        self._recent = _Recent((), began, began)
        self.is_in_file = folder is not None
        self.after_write: Callable[[], None] = lambda: None  # called in the thread that noted it; it must not raise

    @property
    def newest(self) -> int:
        """The number of the newest event."""
        return self._recent.newest

    def events_after(self, number: int) -> EventPage:
        """Return the events of all runs after a number, oldest first."""
        recent = self._recent
        if not recent.oldest <= number <= recent.newest:
            return EventPage((), recent.newest, reset=True)
        return EventPage(tuple(one for one in recent.events if one.number > number), recent.newest, reset=False)

    def digest(self, run_id: str) -> bytes:
        """Return the digest of what was last noted of a run; empty if it must be noted."""
        return self._of(run_id).digest

    def summary(self, run_id: str) -> RunSummary | None:
        """Return the summary of a run, if it is noted."""
        return self._of(run_id).summary

    def noted(self, run_id: str) -> Noted | None:
        """Return what is noted of a run; None if nothing was seen of it yet."""
        stored = _unpacked(self._of(run_id).packed, run_id)
        return None if stored is None else stored.noted

    def see(self, seen: RunSeen) -> None:
        """Replace what is known of a run, and add its new events."""
        now = time.time()
        with self._changing:
            before, known = self.noted(seen.id) or Noted(), self.summary(seen.id)
            rows = {row.name: row for row in seen.generations}
            moved = [
                event
                for row in before.generations.values()
                if (event := _moved(row, rows.get(row.name), now, seen.paths))
            ]
            # What was moved is only now known of these: their files were missed before their marks were seen.
            late = {event.about for event in moved if not before.generations[event.about].in_place}
            wrong = {e.event.about: e.number for e in before.events if e.event.kind == "gone" and e.event.about in late}
            earlier = [one for one in before.events if one.number not in wrong.values()]
            noted = Noted(
                generations=rows,
                incidents={row.name: row for row in seen.incidents},
                curve=before.curve if seen.curve is None else seen.curve,
                events=self._with_new(earlier, seen.id, (*seen.events, *moved)),
            )
            packed = self._put(_Stored(__version__, seen.id, seen.digest, seen.summary, noted))
            if noted.events == before.events and (noted, seen.summary) != (before, known):
                self._tell_of_change(seen.id, now)  # after it is noted: who is told asks at once
        self.after_write()
        self._write(seen.id, packed)

    def happened(self, run_id: str, event: Event) -> None:
        """Add an event of a known run that leaves no record."""
        with self._changing:
            stored = _unpacked(self._of(run_id).packed, run_id)
            if stored is None:
                return
            noted = msgspec.structs.replace(stored.noted, events=self._with_new(stored.noted.events, run_id, (event,)))
            packed = self._put(msgspec.structs.replace(stored, noted=noted))
        self.after_write()
        self._write(run_id, packed)

    def keep_only(self, run_ids: Collection[str]) -> None:
        """Forget all other runs."""
        with self._changing:
            for run_id in [run_id for run_id in self._held if run_id not in run_ids]:
                del self._held[run_id]
                for kind in ("catalogue", "memo"):
                    with contextlib.suppress(OSError):
                        os.unlink(self.path_for(run_id, kind))
            kept = tuple(event for event in self._recent.events if event.run in run_ids)
            self._recent = self._recent._replace(events=kept)

    def remember_runs(self, plan: str, runs: Sequence[KnownRun]) -> None:
        """Keep the list of the runs that are guarded by a plan, for the next process that guards by it."""
        if self._folder is not None:
            with contextlib.suppress(OSError):  # a run's own file says so
                replace_file(os.path.join(self._folder, f"{plan}.runs"), json.dumps(runs).encode())

    def remembered_runs(self, plan: str) -> list[KnownRun]:
        """Return that list as it was kept last; empty if there is none."""
        packed = None if self._folder is None else read_private(os.path.join(self._folder, f"{plan}.runs"), _LARGEST)
        try:
            return [KnownRun(*one) for one in json.loads(packed or b"[]")]
        except (ValueError, TypeError):
            return []

    def _of(self, run_id: str) -> _Held:
        found = self._held.get(run_id)
        if found is None:
            with self._changing:
                found = self._held[run_id] = self._held.get(run_id) or self._load(run_id)
        return found

    def path_for(self, run_id: str, kind: str) -> str:
        """Return the path of a cache about a run, which goes when the run is forgotten; empty without a folder."""
        return "" if self._folder is None else os.path.join(self._folder, f"{run_id}.{kind}")

    def _load(self, run_id: str) -> _Held:
        packed = None if self._folder is None else read_private(self.path_for(run_id, "catalogue"), _LARGEST)
        stored = _unpacked(packed or b"", run_id)
        if stored is None:
            return _Held()
        newest = max((one.number for one in stored.noted.events), default=0)
        if newest > self.newest:  # a clock was put back
            self._recent = _Recent((), newest, newest)
        return _Held(stored.digest, stored.summary, packed or b"")

    def _put(self, stored: _Stored) -> bytes:
        packed = zlib.compress(msgspec.msgpack.encode(stored), 1)
        self._held[stored.id] = _Held(stored.digest, stored.summary, packed)
        return packed

    def _write(self, run_id: str, packed: bytes) -> None:
        """Replace the file of a run. A folder that hangs holds up nobody else: nothing is locked meanwhile."""
        if self._folder is None:
            return
        try:
            replace_file(self.path_for(run_id, "catalogue"), packed)
        except OSError as error:
            if self.is_in_file:
                self._tell(f"the catalogue in {self._folder} cannot be written: {error.strerror or error}")
            self.is_in_file = False
            return
        if not self.is_in_file:
            self._tell(f"the catalogue in {self._folder} can be written again")
        self.is_in_file = True

    def _tell_of_change(self, run_id: str, now: float) -> None:
        """Have those who follow the events ask again: something changed that is no event, such as a pin."""
        number = max(self.newest, int(now * 1e6)) + 1
        event = Event(key=event_key("change", run_id, str(number)), kind="change", at=now, about="")
        # One of a run is enough: many changes must not push out what a reader has missed.
        others = tuple(e for e in self._recent.events if e.run != run_id or e.event.kind != "change")
        self._recent = self._recent._replace(events=others)
        self._add_recent((NumberedEvent(number=number, run=run_id, event=event),))

    def _add_recent(self, new: tuple[NumberedEvent, ...]) -> None:
        recent = (*self._recent.events, *new)
        dropped = recent[:-MOST_RECENT]
        oldest = dropped[-1].number if dropped else self._recent.oldest
        self._recent = _Recent(recent[-MOST_RECENT:], oldest, new[-1].number)

    def _with_new(
        self, before: Sequence[NumberedEvent], run_id: str, events: Iterable[Event]
    ) -> tuple[NumberedEvent, ...]:
        """Return the events of a run with those that are new. The oldest ones without a record go if they are too many.
        The others are as many as the records that they are of, and would be noted again."""
        known = {one.event.key for one in before}
        first = max(self.newest, int(time.time() * 1e6)) + 1
        unknown = {event.key: event for event in events if event.key not in known}.values()
        new = tuple(NumberedEvent(number=first + n, run=run_id, event=event) for n, event in enumerate(unknown))
        if not new:
            return tuple(before)
        self._add_recent(new)
        every = (*before, *new)
        bare = [one.number for one in every if one.event.kind in _WITHOUT_RECORD]
        gone = set(bare[:-MOST_EVENTS])
        return tuple(one for one in every if one.number not in gone)


def _unpacked(packed: bytes, run_id: str) -> _Stored | None:
    """Return the content of a run's file; None if it is none of this run and version."""
    if not packed:
        return None
    try:
        stored = msgspec.msgpack.decode(zlib.decompress(packed), type=decodable(_Stored))
    except (ValueError, zlib.error):  # msgspec's errors are ValueErrors
        return None
    return stored if (stored.version, stored.id) == (__version__, run_id) else None


def _moved(before: Generation, after: Generation | None, now: float, paths: frozenset[str]) -> Event | None:
    """Return the event of a checkpoint that is no longer in place, or is known only now to have been moved."""
    aside = "" if after is None else after.aside
    if (after is not None and after.in_place) or not (before.in_place or (aside and not before.aside)):
        return None
    kind = {"quarantine": "quarantine", "trash": "prune"}.get(aside, "gone")
    if kind == "gone" and before.path in paths:  # saved over, or changed: its verdict says what happened
        return None
    key = event_key(kind, before.name, repr(now))
    return Event(key=key, kind=kind, at=now, about=before.name, step=before.id.number, cause=before.outcome)
