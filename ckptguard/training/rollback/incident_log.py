"""Incidents of a guarded training: recorded once, sent to the daemon, and reported in a file.

Nothing here raises: a failure to record an incident must not end training.
"""

from __future__ import annotations

import re

from ckptguard.records.incidents import Incident, open_incident, read_incident, update_incident
from ckptguard.records.run import Run
from ckptguard.training.client import report_incident
from ckptguard.values.ids import CheckpointId
from ckptguard.values.incident import Details
from ckptguard.values.own_log import log as _log

_NUMBER = re.compile(r"[0-9a-f]{8}|\d+")
_MOST_NAMED = 100
_named: dict[str, set[tuple[str, str, str]]] = {}  # by run: problems that were logged but not recorded


def begin_incident(
    run: Run,
    *,
    step: int | None,
    cause: str,
    reason: str,
    evidence: dict[str, object],
    details: Details | None = None,
    source: str = "guard",
) -> Incident | None:
    """Record an incident, through the daemon if one answers, which notifies people, else directly.

    With `details` it is recorded as handled by a guard. None if it cannot be recorded, which must not stop a rollback.
    The log says so once for each problem, until something is recorded again.
    """
    try:
        named = report_incident(run, step=step, cause=cause, reason=reason, evidence=evidence, source=source)
        incident = read_incident(run, named) if named is not None else None
        if incident is None:
            incident = open_incident(run, step=step, cause=cause, reason=reason, evidence=dict(evidence), source=source)
    except Exception as error:
        known = _named.setdefault(run.url, set())
        # On a full disk every save fails alike, with its own path.
        trouble = (type(error).__name__, cause, _NUMBER.sub("#", reason))
        if trouble not in known and len(known) < _MOST_NAMED:
            known.add(trouble)
            _log.warning("an incident could not be recorded: %s (it was: %s)", error, reason)
        return None
    _named.pop(run.url, None)
    if details is None:
        return incident
    try:
        # A callback stops training, and someone else must go back.
        return update_incident(run, incident, state="open" if source == "callback" else "handling", details=details)
    except Exception as error:
        _log.warning("the details of incident %s could not be recorded: %s", incident.id, error)
        return incident


def note_replay(run: Run, incident: Incident, *, action: str, known_good: CheckpointId) -> Incident:
    """Record that training went back, to make the same updates again: `end_incident` comes when it is known why."""
    try:
        return update_incident(run, incident, state="handling", action=action, known_good=str(known_good))
    except Exception as error:
        _log.warning("the incident %s could not be updated: %s", incident.id, error)
        return incident


def end_incident(
    run: Run, incident: Incident | None, *, action: str, known_good: CheckpointId | None = None, state: str = "closed"
) -> str | None:
    """Record what was done, and write the report. Returns the path of its text.

    `state` is "open" if someone else must go back.
    """
    if incident is None:
        return None
    try:
        from ckptguard.reporting.open_and_close import close_incident  # the report code is loaded only when needed

        named = str(known_good) if known_good is not None else None
        return close_incident(run, incident, action=action, known_good=named, state=state)
    except Exception as error:
        _log.warning("the incident %s could not be updated: %s", incident.id, error)
        return None
