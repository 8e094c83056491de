"""What must be the same of a run, however its catalogue came about."""

from __future__ import annotations

from typing import Any

from ckptguard.catalogue.catalogue import Catalogue

ON_RECORD = ("verdict", "incident", "rollback", "action")


def rows_of(catalogue: Catalogue, run_id: str) -> Any:
    """All rows of a run. The numbers of events may differ, and what leaves no record is left out."""
    noted = catalogue.noted(run_id)
    if noted is None:
        return None
    events = sorted((one.event for one in noted.events if one.event.kind in ON_RECORD), key=lambda e: e.key)
    summary, digest = catalogue.summary(run_id), catalogue.digest(run_id)
    return summary, digest, dict(noted.generations), dict(noted.incidents), noted.curve, events
