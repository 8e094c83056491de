"""What happened lately in runs that no catalogue holds. It is lost when the daemon ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from ckptguard.catalogue.questions import EventPage
from ckptguard.catalogue.rows import Event, NumberedEvent

_MOST = 2000


class EventLog:
    """The newest events, in memory. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[tuple[str, int], NumberedEvent] = {}
        # Numbers go on above those of a daemon before, as they do in a catalogue.
        self._first = self._last = int(time.time() * 1e6)

    def add(self, run_id: str, events: Iterable[Event]) -> None:
        """Add those events that are new."""
        with self._lock:
            for event in events:
                if (run_id, event.key) in self._events:
                    continue
                self._last += 1
                self._events[run_id, event.key] = NumberedEvent(number=self._last, run=run_id, event=event)
                if len(self._events) > _MOST:
                    oldest = self._events.pop(next(iter(self._events)))
                    self._first = oldest.number

    def of(self, run_id: str) -> tuple[NumberedEvent, ...]:
        """Return the events of one run, oldest first."""
        with self._lock:
            return tuple(event for (id, _), event in self._events.items() if id == run_id)

    def after(self, number: int, *, most: int) -> EventPage:
        """Return the events after a number, as the catalogue's `events_after`."""
        with self._lock:
            reset = number != 0 and not self._first <= number <= self._last
            found = () if reset else tuple(e for e in self._events.values() if e.number > number)[:most]
            return EventPage(events=found, last=found[-1].number if found else self._last, reset=reset)
