"""Leave a report: an incident's report beside its record, as text and as a page."""

from __future__ import annotations

from ckptguard.errors import ObjectExistsError
from ckptguard.incident_html import report_html
from ckptguard.incident_text import report_text
from ckptguard.operations.incident_report import report_of
from ckptguard.records.incidents import Incident, report_key
from ckptguard.records.run import Run, create_record


def leave_report(run: Run, incident: Incident) -> str:
    """Write the report; returns where its text is. One that is there already stays: what came later is in the
    incident's revisions."""
    report = report_of(run, incident)
    for suffix, text in (("html", report_html(report)), ("txt", report_text(report))):
        try:
            create_record(run, report_key(incident.id, suffix), text.encode("utf-8", "backslashreplace"))
        except ObjectExistsError:
            pass
    return run.usable_record(report_key(incident.id, "txt"))
