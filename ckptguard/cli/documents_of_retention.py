"""The JSON documents of `prune`, `pin` and `unpin`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptguard.cli.documents import Document, document
from ckptguard.values.ids import checkpoint_id

if TYPE_CHECKING:
    from ckptguard.decisions.retention import Decision
    from ckptguard.records.pins import Pin
    from ckptguard.records.trash import Trashed
    from ckptguard.retention.prune import Pruned


def prune_document(target: str, pruned: Pruned) -> Document:
    """The answer of `prune`."""
    policy = pruned.policy
    gone = {decision.checkpoint.path for decision in pruned.removed}
    return document(
        "prune",
        target=target,
        dry_run=pruned.dry_run,
        policy={
            "keep_last": policy.keep_last,
            "keep_every": policy.keep_every,
            "keep_within": policy.keep_within,
            "keep_best": [str(best) for best in policy.keep_best],
            "keep_good": policy.keep_good,
            "failed": policy.drop_failed,
        },
        kept=[_decision_fields(d) for d in pruned.decisions if d.checkpoint.path not in gone],
        removed=[_decision_fields(d) for d in pruned.removed],
        emptied=[_trash_fields(mark) for mark in pruned.emptied],
        in_trash=[_trash_fields(mark) for mark in pruned.in_trash],
        could_not_tell=pruned.could_not_tell,
    )


def _decision_fields(decision: Decision) -> Document:
    chosen = decision.checkpoint
    return {
        "path": chosen.path,
        "series": chosen.series,
        "step": chosen.step,
        "id": chosen.id,
        "outcome": chosen.outcome.value,
        "bytes": chosen.bytes,
        "metrics": dict(chosen.metrics),
        "reasons": list(decision.reasons),
    }


def _trash_fields(mark: Trashed) -> Document:
    return {
        "path": mark.path,
        "series": mark.series,
        "step": mark.step,
        "id": mark.id,
        "bytes": mark.bytes,
        "removed_at": mark.removed_at,
    }


def pins_document(command: str, target: str, pins: Sequence[Pin]) -> Document:
    """The answer of `pin` and of `unpin`: the pins that were set, or released."""
    fields = [
        {
            "series": pin.series,
            "step": pin.step,
            "id": checkpoint_id(pin.step, pin.generation),
            "reason": pin.reason,
            "note": pin.note,
            "since": pin.since,
            "until": pin.until,
        }
        for pin in pins
    ]
    return document(command, target=target, pins=fields)
