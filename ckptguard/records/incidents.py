"""Incidents on storage: each change is a new revision, exclusively created. The highest revision counts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from ckptguard.errors import ObjectExistsError
from ckptguard.records.run import Run, create_record, list_records, read_sound
from ckptguard.records.who_and_when import dated_name, utc_now
from ckptguard.values.incident import Details, worded
from ckptguard.values.record_formats import PLAIN
from ckptguard.values.record_text import encoded

FOLDER = "incidents"
_LONGEST = 2000  # characters of a text in a new incident
_NAME = re.compile(r"(?P<id>\d{8}T\d{6}-[0-9a-f]{8})\.(?P<revision>\d{4})\.json")


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One trouble (NaN, damage, a crash, a save that failed), or a rollback that was asked for: its evidence, and what
    was done. `details` has more, if known."""

    format: int = PLAIN.writes
    id: str
    revision: int = 1
    step: int | None
    cause: str  # "numeric" | "damage" | "crash" | ...
    reason: str
    evidence: dict[str, Any] = {}
    opened_at: str
    state: str = "open"  # "open" | "handling" | "closed"
    actions: tuple[str, ...] = ()
    source: str  # who noticed: "guard", "daemon", "callback", "cli", "api", "supervise", "gate"
    known_good: str | None = None
    details: Details | msgspec.UnsetType = msgspec.UNSET
    closed_at: str | msgspec.UnsetType = msgspec.UNSET  # release 0.1 did not write it

    def known_details(self) -> Details:
        """Return the details; empty ones if there are none."""
        return self.details if isinstance(self.details, Details) else Details()


def open_incident(
    run: Run, *, step: int | None, cause: str, reason: str, evidence: dict[str, Any], source: str
) -> Incident:
    """Record a new incident. Long texts are cut, because a record is read, sent and shown often."""
    name, now = dated_name()
    cause, reason, source = map(_cut, (cause, reason, source))
    incident = Incident(id=name, step=step, cause=cause, reason=reason, evidence=evidence, opened_at=now, source=source)
    _write(run, incident)
    return incident


def update_incident(
    run: Run,
    incident: Incident,
    *,
    state: str | None = None,
    action: str | None = None,
    known_good: str | None = None,
    details: Details | None = None,
    evidence: dict[str, Any] | None = None,
) -> Incident:
    """Record an action on an incident, or more evidence, after any concurrent update of it."""
    while True:
        closes = state == "closed" and incident.state != "closed"
        incident = msgspec.structs.replace(
            incident,
            closed_at=utc_now() if closes else incident.closed_at,
            revision=incident.revision + 1,
            state=state or incident.state,
            actions=(*incident.actions, action) if action else incident.actions,
            known_good=known_good or incident.known_good,
            details=details if details is not None else incident.details,
            evidence={**incident.evidence, **(evidence or {})},
        )
        try:
            _write(run, incident)
            return incident
        except ObjectExistsError:
            newest = read_incident(run, incident.id)
            incident = newest or incident


def read_incident(run: Run, incident_id: str) -> Incident | None:
    """Return the newest revision of an incident."""
    revision = _revisions_of(run).get(incident_id)
    return None if revision is None else read_revision(run, incident_id, revision)


def list_incidents(run: Run, *, most: int = 0) -> list[Incident]:
    """Return the newest `most` incidents (0: all), oldest first. Damaged records are left out."""
    newest = sorted(_revisions_of(run).items())[-most:]
    found = (read_revision(run, incident_id, revision) for incident_id, revision in newest)
    return [incident for incident in found if incident is not None]


def incident_ids(run: Run) -> list[str]:
    """The ids of all incidents, oldest first; none of them is read."""
    return sorted(_revisions_of(run))


def _revisions_of(run: Run) -> dict[str, int]:
    return newest_revisions(list_records(run, FOLDER))


def newest_revisions(names: Iterable[str]) -> dict[str, int]:
    """Return the newest revision of each incident that these record names are about."""
    newest: dict[str, int] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match:
            newest[match["id"]] = max(newest.get(match["id"], 0), int(match["revision"]))
    return newest


def read_revision(run: Run, incident_id: str, revision: int) -> Incident | None:
    """Return one revision of an incident, or None if it does not exist or cannot be parsed."""
    return read_sound(run, incident_key(incident_id, revision), Incident, "an incident")


def incident_key(incident_id: str, revision: int) -> str:
    """Return the records key of an incident's revision."""
    return f"{FOLDER}/{incident_id}.{revision:04d}.json"


def report_key(incident_id: str, suffix: str) -> str:
    """Return the records key of the report for people: its text (`txt`) or its page (`html`)."""
    return f"{FOLDER}/{incident_id}.{suffix}"


def _write(run: Run, incident: Incident) -> None:
    # msgspec writes NaN as null. Evidence is for people, so such numbers are written as words.
    spoken = msgspec.structs.replace(incident, evidence=_spoken(incident.evidence))
    create_record(run, incident_key(incident.id, incident.revision), encoded(spoken) + b"\n")


def _spoken(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _spoken(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_spoken(v) for v in value]
    if isinstance(value, float):
        return worded(value)
    return value if isinstance(value, int | bool | None) else _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
