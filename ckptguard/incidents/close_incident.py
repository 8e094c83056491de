"""Close an incident: what was done, with everything that the records add to it now, and the report for people."""

from __future__ import annotations

import logging

import msgspec

from ckptguard.errors import CkptguardError, ObjectExistsError
from ckptguard.incidents.build_report import report_of
from ckptguard.incidents.report_html import report_html
from ckptguard.incidents.report_text import report_text
from ckptguard.incidents.same_cause import close_those_of
from ckptguard.records.incidents import Incident, report_key, update_incident
from ckptguard.records.run import Run, create_record
from ckptguard.runs.run_view import RunView
from ckptguard.values.incident import Details
from ckptguard.values.settings import Settings

_log = logging.getLogger("ckptguard")


def close_incident(
    run: Run, incident: Incident, *, action: str, known_good: str | None = None, state: str = "closed"
) -> str | None:
    """Record what was done and leave the report; returns where its text is, None if it could not be made: a report is
    worth having, and never worth what it reports. `state` is "open" where somebody else has to go on. What a daemon
    noted about saves of the same trouble is closed with it.

    Whatever the storage refuses of the record itself is raised.
    """
    concluded = _concluded(run, msgspec.structs.replace(incident, known_good=known_good or incident.known_good))
    closed = update_incident(run, incident, state=state, action=action, known_good=known_good, details=concluded)
    try:
        close_those_of(run, closed, action=action)
    except CkptguardError as error:
        _log.warning("incidents about saves of the same trouble stay open: %s", error.message)
    return leave_report(run, closed)


def leave_report(run: Run, incident: Incident) -> str | None:
    """Write the report as text and page; returns where the text is. One that is there already stays: what came later
    is in the incident's revisions. Never raises."""
    try:
        report = report_of(_view(run), incident)
        for suffix, text in (("html", report_html(report)), ("txt", report_text(report))):
            try:
                create_record(run, report_key(incident.id, suffix), text.encode("utf-8", "backslashreplace"))
            except ObjectExistsError:
                pass
        return run.usable_record(report_key(incident.id, "txt"))
    except Exception as error:
        _log.warning("the report of incident %s could not be written: %r", incident.id, error)
        return None


def _concluded(run: Run, incident: Incident) -> Details | None:
    """The details with what the records add to them now, and the likely causes."""
    try:
        return report_of(_view(run), incident).details
    except Exception as error:
        _log.warning("the report of incident %s is not complete: %r", incident.id, error)
        return None


def _view(run: Run) -> RunView:
    """Enough to report by: only records are read, which the settings of a run do not change."""
    return RunView(run, Settings())
