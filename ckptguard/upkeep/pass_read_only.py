"""Look at a run while another daemon makes the passes over it."""

from __future__ import annotations

from ckptguard.runs.run_view import RunView
from ckptguard.upkeep.reconcile import (
    PassNotes,
    PassResult,
    PendingSave,
    current_verdict_of,
    sample_of,
    start_of,
    unread_save,
)


def pass_read_only(view: RunView, notes: PassNotes) -> PassResult:
    """Note what is there and has a verdict, and write nothing: another daemon makes the passes. Raises
    CouldNotTellError."""
    notes.settled, notes.start = None, start_of(view, notes.start)
    there = {checkpoint.path: checkpoint for checkpoint in view.checkpoints}
    for path in notes.samples.keys() - there.keys():
        del notes.samples[path]
    pending = []
    for path, checkpoint in there.items():
        if checkpoint.unread is not None:
            pending.append(unread_save(checkpoint))
            continue
        sample = sample_of(notes, checkpoint)
        if not sample.done:
            sample.id = current_verdict_of(view, checkpoint)
            sample.done = sample.id is not None
        if not sample.done:
            why = "another daemon verifies it"
            pending.append(PendingSave(path=path, series=checkpoint.series, step=checkpoint.step, reason=why))
    return PassResult(
        pending=tuple(pending),
        unread=notes.start.listing.unread_notes,
        not_understood=notes.start.listing.not_understood,
    )
