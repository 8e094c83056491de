"""Incidents of a guarded training: recorded once, told to the daemon, and left as a report that people can read."""

from __future__ import annotations

import logging

from ckptguard.errors import CkptguardError, ObjectExistsError
from ckptguard.records.incidents import Incident, open_incident, read_incident, update_incident
from ckptguard.records.run import Run, create_record
from ckptguard.training.client import report_incident

_log = logging.getLogger("ckptguard")


def begin_incident(
    run: Run, *, step: int | None, cause: str, reason: str, evidence: dict[str, object]
) -> Incident | None:
    """Record an incident, through the daemon if one answers (it tells people), else directly. None, and a warning in
    the log, if it cannot be recorded: that must not stop a rollback."""
    try:
        told = report_incident(run, step=step, cause=cause, reason=reason, evidence=evidence)
        incident = read_incident(run, told) if told is not None else None
        if incident is None:
            incident = open_incident(
                run, step=step, cause=cause, reason=reason, evidence=dict(evidence), source="guard"
            )
        return incident
    except CkptguardError as error:
        _log.warning("an incident could not be recorded: %s (it was: %s)", error.message, reason)
        return None


def end_incident(run: Run, incident: Incident | None, *, action: str, known_good: str | None = None) -> str | None:
    """Say what was done, and write the report; returns the report's path."""
    if incident is None:
        return None
    try:
        incident = update_incident(run, incident, state="closed", action=action, known_good=known_good)
        key = f"incidents/{incident.id}.txt"
        try:
            create_record(run, key, _report(run, incident).encode())
        except ObjectExistsError:
            pass  # a report is written once; what came later is in the revisions
        return run.usable_record(key)
    except CkptguardError as error:
        _log.warning("the incident %s could not be updated: %s", incident.id, error.message)
        return None


def _report(run: Run, incident: Incident) -> str:
    lines = [
        f"Incident {incident.id} of {run.url}",
        "",
        f"opened:     {incident.opened_at}",
        f"step:       {'-' if incident.step is None else incident.step}",
        f"cause:      {incident.cause}",
        f"reason:     {incident.reason}",
        *(f"evidence:   {key} = {value}" for key, value in sorted(incident.evidence.items())),
        *(f"done:       {action}" for action in incident.actions),
        f"known-good: {incident.known_good or '-'}",
        "",
    ]
    return "\n".join(lines)
