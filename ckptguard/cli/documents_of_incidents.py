"""The JSON documents of `incidents` and `incident`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ckptguard.cli.documents import Document, document

if TYPE_CHECKING:
    from ckptguard.records.incidents import Incident
    from ckptguard.values.incident import CheckpointFacts, Report


def incidents_document(target: str, incidents: Sequence[Incident]) -> Document:
    """The answer of `incidents`."""
    return document("incidents", target=target, incidents=[_line(i) for i in incidents])


def _line(incident: Incident) -> Document:
    details = incident.known_details()
    return {
        "id": incident.id,
        "opened_at": incident.opened_at,
        "step": incident.step,
        "onset": details.onset,
        "onset_through": details.onset_through,
        "cause": incident.cause,
        "reason": incident.reason,
        "state": incident.state,
        "source": incident.source,
        "actions": incident.actions,
        "known_good": incident.known_good,
        "likely_cause": details.causes[0].name if details.causes else None,
    }


def incident_document(report: Report) -> Document:
    """The answer of `incident`."""
    details = report.details
    return document(
        "incident",
        target=report.run,
        id=report.id,
        opened_at=report.opened_at,
        step=report.step,
        onset=report.onset,
        onset_through=details.onset_through,
        cause=report.cause,
        reason=report.reason,
        state=report.state,
        source=report.source,
        actions=report.actions,
        known_good=report.known_good,
        evidence=report.evidence,
        causes=[
            {name: getattr(c, name) for name in ("name", "title", "confidence", "because", "advice")}
            for c in details.causes
        ],
        tensors=[_fields(t) for t in details.tensors],
        tensors_omitted=details.tensors_omitted,
        tensors_from=details.tensors_from,
        changes=[{**_fields(c), "fp16_headroom": _share(c.largest)} for c in details.changes],
        changes_omitted=details.changes_omitted,
        changes_note=details.changes_note,
        last_good=_checkpoint(details.last_good),
        first_bad=_checkpoint(details.first_bad),
        training=None if details.training is None else _fields(details.training),
        resumed=None if details.resumed is None else _fields(details.resumed),
        samples=[_fields(s) for s in details.samples],
    )


def _checkpoint(facts: CheckpointFacts | None) -> Document | None:
    if facts is None:
        return None
    largest = [{**_fields(m), "fp16_headroom": _share(m.largest)} for m in facts.largest]
    errors = [{"check": check, "message": said} for check, said in facts.errors]
    return {**_fields(facts), "largest": largest, "errors": errors}


def _share(largest: float | None) -> float | None:
    from ckptguard.formats.dtypes import FP16_LIMIT

    return None if largest is None else largest / FP16_LIMIT


def _fields(value: msgspec.Struct) -> Document:
    """All fields, also those that are not known."""
    return msgspec.structs.asdict(value)
