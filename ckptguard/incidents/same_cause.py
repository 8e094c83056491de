"""Same trouble: a sickness that a guard noticed inside of training, and the poisoned save that a daemon found, are one.

A bad save becomes evidence of the incident that is there. An incident that deals with the trouble closes those that
were opened about its saves.
"""

from __future__ import annotations

import datetime

from ckptguard.errors import RecordsError
from ckptguard.incidents.report_words import NO_SICKNESS
from ckptguard.records.incidents import Incident, list_incidents, update_incident
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import Run
from ckptguard.values.ids import CheckpointId, parse_id

_MOST = 64  # incidents that are looked at, the newest ones
_SECOND = 1_000_000_000  # incidents are dated to the second
_OF_STORAGE = (*NO_SICKNESS, "damage", "crash")


def incident_of(run: Run, id: CheckpointId) -> Incident | None:
    """The newest incident from inside of training that explains why a checkpoint's numbers are sick: the save falls
    between its onset and where it was noticed, and was written before. None if there is none."""
    found = [i for i in list_incidents(run, most=_MOST) if _is_cause(run, i, id)]
    return found[-1] if found else None


def close_those_of(run: Run, incident: Incident, *, action: str) -> None:
    """Close the open incidents about sick saves that are the same trouble as this one, which was dealt with by
    `action`."""
    for other in list_incidents(run, most=_MOST):
        about, series = other.evidence.get("checkpoint"), other.evidence.get("series")
        ours = other.source == "daemon" and other.cause == "numeric" and other.state == "open"
        if (
            ours
            and other.id != incident.id
            and isinstance(about, str)
            and isinstance(series, str)
            and _is_cause(run, incident, parse_id(series, about))
        ):
            reason = f"the same trouble as incident {incident.id}: {action}"
            update_incident(run, other, state="closed", action=reason, known_good=incident.known_good)


def _is_cause(run: Run, incident: Incident, id: CheckpointId | None) -> bool:
    if id is None or id.step is None or incident.step is None:
        return False
    if incident.source == "daemon" or incident.cause in _OF_STORAGE:
        return False
    onset = incident.known_details().onset
    first = onset if onset is not None else incident.step
    return first <= id.step <= incident.step and _written_before(run, incident, id)


def _written_before(run: Run, incident: Incident, id: CheckpointId) -> bool:
    """Whether the save was there when the incident was opened: what was saved since is of the training after it."""
    try:
        manifest = read_manifest(run, id)
    except RecordsError:
        return False
    times = [f.mtime_ns for f in manifest.files if f.mtime_ns is not None] if manifest is not None else []
    try:
        opened = datetime.datetime.fromisoformat(incident.opened_at).timestamp()
    except (ValueError, OverflowError):
        return False
    return bool(times) and max(times) < (int(opened) + 1) * _SECOND
