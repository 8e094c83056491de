"""What happened to a run, told from its records alone."""

from __future__ import annotations

import textwrap
from pathlib import Path

from ckptguard.inspect.list_states import CheckpointState, survey
from ckptguard.records.incidents import Incident, list_incidents
from ckptguard.runs.run_view import open_view
from ckptguard.values.settings import Settings


def print_timeline(path: Path) -> None:
    """Every checkpoint with its verdict and reason, and every incident with what was done about it."""
    view = open_view(str(path), Settings())
    events = [(state.verified_at or "", state.step or 0, of_checkpoint(state)) for state in survey(view)]
    events += [(incident.opened_at, incident.step or 0, of_incident(incident)) for incident in list_incidents(view.run)]
    print("\nTimeline, from the records:")
    for time, _, lines in sorted(events):
        print(f"  {time[11:19]}  {lines[0]}")
        for line in lines[1:]:
            print(textwrap.fill(line, 100, initial_indent=" " * 14, subsequent_indent=" " * 14))


def of_checkpoint(state: CheckpointState) -> list[str]:
    """A checkpoint: its name, id, verdict and place, then the reason for a verdict that is not good."""
    kept = f"kept ({state.kept_how})"
    places = [(state.in_place, "in place"), (state.kept, kept), (state.quarantined, "quarantined")]
    where = ", ".join(word for there, word in places if there) or "gone"
    head = f"{state.path}  {state.id or '-'!s:6} {state.outcome.value.upper():10}  {where}"
    return [head, state.reason] if state.reason else [head]


def of_incident(incident: Incident) -> list[str]:
    """An incident: what was seen at which step, then the evidence and what was done."""
    evidence = ", ".join(f"{name} {value}" for name, value in incident.evidence.items())
    where = "" if incident.step is None else f" at step {incident.step}"
    head = f"INCIDENT{where}: {incident.reason} ({evidence})"
    return [head, *(f"-> {action}" for action in incident.actions)]
