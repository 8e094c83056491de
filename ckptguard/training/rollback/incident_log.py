"""Incidents of a guarded training: recorded once, told to the daemon, and left as a report that people can read.

Nothing here raises: an incident is worth a record, and never the training.
"""

from __future__ import annotations

import logging
import re

from ckptguard.records.incidents import Incident, open_incident, read_incident, update_incident
from ckptguard.records.run import Run
from ckptguard.training.client import report_incident
from ckptguard.values.ids import CheckpointId
from ckptguard.values.incident import Details

_log = logging.getLogger("ckptguard")
_NUMBER = re.compile(r"[0-9a-f]{8}|\d+")
_MOST_NAMED = 100
_named: dict[str, set[tuple[str, str, str]]] = {}  # by run: what was said and is not recorded


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
    """Record an incident, through the daemon if one answers (it tells people), else directly. With `details` it is
    noted that a guard deals with it. None if it cannot be recorded, which must not stop a rollback; the log says so, of
    the same trouble once until something is recorded again."""
    try:
        named = report_incident(run, step=step, cause=cause, reason=reason, evidence=evidence, source=source)
        incident = read_incident(run, named) if named is not None else None
        if incident is None:
            incident = open_incident(run, step=step, cause=cause, reason=reason, evidence=dict(evidence), source=source)
    except Exception as error:
        known = _named.setdefault(run.url, set())
        # On a full disk every save fails alike, for its own path.
        trouble = (type(error).__name__, cause, _NUMBER.sub("#", reason))
        if trouble not in known and len(known) < _MOST_NAMED:
            known.add(trouble)
            _log.warning("an incident could not be recorded: %s (it was: %s)", error, reason)
        return None
    _named.pop(run.url, None)
    if details is None:
        return incident
    try:
        # A callback stops training, and somebody else has to go back.
        return update_incident(run, incident, state="open" if source == "callback" else "handling", details=details)
    except Exception as error:
        _log.warning("the details of incident %s could not be recorded: %s", incident.id, error)
        return incident


def end_incident(
    run: Run, incident: Incident | None, *, action: str, known_good: CheckpointId | None = None, state: str = "closed"
) -> str | None:
    """Say what was done, and leave the report; returns the path of its text. `state` is "open" where somebody else
    has to go back."""
    if incident is None:
        return None
    try:
        from ckptguard.reporting.open_and_close import close_incident  # the report is loaded when one is written

        named = str(known_good) if known_good is not None else None
        return close_incident(run, incident, action=action, known_good=named, state=state)
    except Exception as error:
        _log.warning("the incident %s could not be updated: %s", incident.id, error)
        return None
