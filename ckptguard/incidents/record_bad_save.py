"""Record a bad save: an incident about a checkpoint that turned bad or suspect, with its report, once."""

from __future__ import annotations

from ckptguard.incidents.close_incident import leave_report
from ckptguard.incidents.events import reason_of
from ckptguard.incidents.same_cause import incident_of
from ckptguard.records.incidents import Incident, list_incidents, open_incident, update_incident
from ckptguard.records.run import Run
from ckptguard.runs.results import Checked
from ckptguard.values.verdict import Outcome, Severity

_RECORDED = (Outcome.BAD, Outcome.SUSPECT)
_LONGEST = 10_000  # characters about bad saves of one trouble
_OF_NUMBERS = ("finite", "stale", "incident")


def record_bad_save(run: Run, checked: Checked, *, source: str) -> Incident | None:
    """Open an incident about a checkpoint, and leave what the records know of it as a report; where training noticed
    the same trouble itself, that becomes evidence of its incident instead. None where there is nothing to record: it is
    not bad, or there is an incident about this generation already."""
    if checked.outcome not in _RECORDED or checked.id is None:
        return None
    about = {"checkpoint": str(checked.id), "series": checked.series, "path": checked.path}
    if any(about.items() <= incident.evidence.items() for incident in list_incidents(run)):
        return None
    errors = {f.check for f in checked.findings if f.severity in (Severity.ERROR, Severity.SICKNESS)}
    numeric = bool(errors & set(_OF_NUMBERS))
    noticed = incident_of(run, checked.id) if numeric and errors <= set(_OF_NUMBERS) else None
    if noticed is not None:
        sentence, known = (
            f"{checked.path} ({checked.id}): {reason_of(checked)}",
            str(noticed.evidence.get("bad_saves", "")),
        )
        if sentence in known or len(known) > _LONGEST:
            return None
        return update_incident(run, noticed, evidence={"bad_saves": f"{known}; {sentence}" if known else sentence})
    incident = open_incident(
        run,
        step=checked.step,
        cause="numeric" if numeric else "damage",
        reason=f"{checked.path} is {checked.outcome.value}: {reason_of(checked)}",
        evidence=dict(about),
        source=source,
    )
    leave_report(run, incident)
    return incident
