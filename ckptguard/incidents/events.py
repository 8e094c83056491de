"""What hooks are told, and the rule that each event is told once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ckptguard.decisions.known_good import standings
from ckptguard.records.incidents import Incident
from ckptguard.records.ledger import ledger_names
from ckptguard.records.run import Run
from ckptguard.runs.results import Checked
from ckptguard.values.ids import escape
from ckptguard.values.verdict import Outcome, Severity

Known = dict[tuple[str, str], Outcome]  # (series, id) -> outcome

_TOLD = (Outcome.BAD, Outcome.SUSPECT, Outcome.INCOMPLETE)
_MOST_FINDINGS = 20


def known_outcomes(run: Run) -> Known:
    """The outcomes that the ledger holds now: none of them is news."""
    return {
        (series, str(id)): standing.outcome
        for series, names in ledger_names(run).items()
        for id, standing in standings(series, names).items()
    }


def news_in(checked: Iterable[Checked], known: Known) -> list[Checked]:
    """Those that turned bad, suspect or incomplete since `known`, which is brought up to date."""
    news = []
    for one in checked:
        key = (one.series, one.path if one.id is None else str(one.id))
        if one.outcome in _TOLD and known.get(key) is not one.outcome:
            news.append(one)
        known[key] = one.outcome
    return news


def verdict_event(run: Run, checked: Checked, *, source: str) -> dict[str, Any]:
    """What hooks are told of a checkpoint that turned bad, suspect or incomplete."""
    id = None if checked.id is None else str(checked.id)
    weighty = [f for f in checked.findings if f.severity in (Severity.ERROR, Severity.SICKNESS)]
    return {
        **_event(run, "verdict", checked.step, cause=checked.outcome.value, reason=reason_of(checked), source=source),
        "checkpoint": {"path": escape(checked.path), "series": escape(checked.series), "id": id},
        "findings": [
            {"check": f.check, "file": _escaped(f.file), "tensor": _escaped(f.tensor), "message": escape(f.message)}
            for f in weighty[:_MOST_FINDINGS]
        ],
    }


def incident_event(run: Run, incident: Incident) -> dict[str, Any]:
    """What hooks are told of an incident that was reported."""
    cause, reason, source = escape(incident.cause), escape(incident.reason), escape(incident.source)
    event = _event(run, "incident", incident.step, cause=cause, reason=reason, source=source)
    return {**event, "incident": msgspec.to_builtins(incident)}


def replica_event(run: Run, url: str, reason: str, *, source: str) -> dict[str, Any]:
    """What hooks are told of a replica that cannot be brought up to date."""
    return _event(run, "replica", None, cause="replica", reason=escape(f"{url}: {reason}"), source=source)


def _event(run: Run, event: str, step: int | None, *, cause: str, reason: str, source: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "command": "incident",
        "event": event,
        "run": run.run_id,
        "url": escape(run.url),
        "step": step,
        "cause": cause,
        "reason": reason,
        "source": source,
        "checkpoint": None,
        "findings": [],
        "incident": None,
    }


def reason_of(checked: Checked) -> str:
    """The heaviest finding in one line; "" where nothing weighs."""
    for severity in (Severity.ERROR, Severity.SICKNESS, Severity.WARNING):
        for finding in checked.findings:
            if finding.severity is severity:
                about = finding.tensor or finding.file
                return escape(f"{about}: {finding.message}" if about else finding.message)
    return ""


def _escaped(text: str | None) -> str | None:
    return None if text is None else escape(text)
