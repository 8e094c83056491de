"""Incidents of a guarded training: recorded once, told to the daemon, and left as a report that people can read.

Nothing here raises: an incident is worth a record, and never the training.
"""

from __future__ import annotations

import logging
import re

from ckptguard.incidents.close_incident import close_incident
from ckptguard.records.incidents import Incident, open_incident, read_incident, update_incident
from ckptguard.records.run import Run
from ckptguard.training.client import report_incident
from ckptguard.values.incident import Details

_log = logging.getLogger("ckptguard")
_NUMBER = re.compile(r"[0-9a-f]{8}|\d+")
_MOST_TOLD = 100
_told: dict[str, set[tuple[str, str, str]]] = {}  # by run: what was said and is not recorded


def begin_incident(
    run: Run,
    *,
    step: int | None,
    cause: str,
    reason: str,
    evidence: dict[str, object],
    details: Details | None = None,
    source: str = "guard",
    state: str = "handling",
) -> Incident | None:
    """Record an incident, through the daemon if one answers (it tells people), else directly. With `details` its
    `state` is noted too. None if it cannot be recorded, which must not stop a rollback; the log says so, of the same
    trouble once until something is recorded again."""
    try:
        named = report_incident(run, step=step, cause=cause, reason=reason, evidence=evidence, source=source)
        incident = read_incident(run, named) if named is not None else None
        if incident is None:
            incident = open_incident(run, step=step, cause=cause, reason=reason, evidence=dict(evidence), source=source)
    except Exception as error:
        told = _told.setdefault(run.url, set())
        # On a full disk every save fails alike, for its own path.
        trouble = (type(error).__name__, cause, _NUMBER.sub("#", reason))
        if trouble not in told and len(told) < _MOST_TOLD:
            told.add(trouble)
            _log.warning("an incident could not be recorded: %s (it was: %s)", error, reason)
        return None
    _told.pop(run.url, None)
    try:
        return update_incident(run, incident, state=state, details=details) if details is not None else incident
    except Exception as error:
        _log.warning("the details of incident %s could not be recorded: %s", incident.id, error)
        return incident


def end_incident(
    run: Run, incident: Incident | None, *, action: str, known_good: str | None = None, state: str = "closed"
) -> str | None:
    """Say what was done, and leave the report; returns the path of its text. `state` is "open" where somebody else
    has to go back."""
    if incident is None:
        return None
    try:
        return close_incident(run, incident, action=action, known_good=known_good, state=state)
    except Exception as error:
        _log.warning("the incident %s could not be updated: %s", incident.id, error)
        return None
