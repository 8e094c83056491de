"""The JSON documents of `scrub` and `repair`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptguard.cli.documents import Document, checked_fields, document, finding_fields
from ckptguard.records.clock import utc_text

if TYPE_CHECKING:
    from ckptguard.repair.repair import Repaired
    from ckptguard.repair.scrub import Scrubbed


def scrub_document(target: str, done: Scrubbed) -> Document:
    """The answer of `scrub`."""
    places = [
        {
            "path": one.path,
            "series": one.series,
            "step": one.step,
            "id": one.id,
            "place": one.place,
            "outcome": one.outcome.value,
            "bytes": one.bytes,
            "seconds": one.seconds,
            "findings": [finding_fields(f) for f in one.findings],
        }
        for one in done.places
    ]
    next_one = None
    if done.next is not None:
        next_one = {
            "path": done.next.path,
            "id": done.next.id,
            "place": done.next.place,
            "last_read_at": None if done.next.last is None else utc_text(done.next.last),
        }
    return document(
        "scrub",
        target=target,
        stopped=done.stopped,
        left=done.left,
        places=places,
        next=next_one,
        could_not_tell=done.could_not_tell,
    )


def repair_document(target: str, done: Repaired) -> Document:
    """The answer of `repair`."""
    return document(
        "repair",
        target=target,
        dry_run=done.dry_run,
        files=done.files,
        checkpoints=[checked_fields(c) for c in done.checked],
        could_not_tell=done.could_not_tell,
    )
