"""What operators had done to a run, as events: one when an action began, and one when it had ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckptguard.catalogue.look import below
from ckptguard.catalogue.rows import Event, event_key
from ckptguard.records.audit import BEGAN, parse_action, read_state
from ckptguard.records.audit import FOLDER as AUDIT
from ckptguard.records.run import Run
from ckptguard.records.who_and_when import seconds_of
from ckptguard.values.ids import escape
from ckptguard.values.run_rows import LONGEST_TEXT

KIND = "action"


def action_events(run: Run, names: Iterable[str], known: Collection[int]) -> list[Event]:
    """Return the events of actions whose keys are not known. Raises StorageError."""
    events = []
    for id, state in sorted(filter(None, map(parse_action, below(AUDIT, names)))):
        key = event_key(KIND, id, state)
        action = read_state(run, id, state) if key not in known else None
        if action is None:
            continue
        came_of_it = f": {action.result[0]}" if action.result else ""
        text = action.reason if state == BEGAN else f"{action.state}{came_of_it}"
        events.append(
            Event(
                key=key,
                kind=KIND,
                at=seconds_of(action.began_at if state == BEGAN else action.ended_at or ""),
                about=id,
                cause=escape(action.verb[:LONGEST_TEXT]),
                text=escape(f"{action.name}: {text}"[:LONGEST_TEXT]),
            )
        )
    return events
