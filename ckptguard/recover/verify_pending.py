"""Verify what was saved since the newest known-good checkpoint, and has no verdict yet."""

from __future__ import annotations

import msgspec

from ckptguard.errors import CouldNotTellError, DeniedError, ObjectMissingError, StorageError
from ckptguard.layouts import Checkpoint
from ckptguard.runs.find_known_good import ANY, Wanted, newest_candidate
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work
from ckptguard.runs.writers import pause_between_files, writer_of
from ckptguard.values.ids import CheckpointId, numbers_of, single_number
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint
from ckptguard.verification.collect_evidence import unfinished_because


def verify_pending(
    view: RunView, wanted: Wanted = ANY, *, dry_run: bool = False, sure: bool = False, work: Work = PLAIN
) -> list[str]:
    """Verify checkpoints without a verdict that are newer than the known-good one, newest first, until one is GOOD.

    Returns the paths that still have no verdict; with `dry_run` all of them. Never raises because of their bytes. With
    `sure` it raises StorageError if one could not be read.
    """
    floors: dict[str, tuple[tuple[int, ...], int]] = {}
    left = []
    found = [c for c in view.checkpoints if wanted.is_of(c.series)]
    found.sort(key=lambda c: (c.written_at, c.path))  # several of one step are sealed in the order of saving
    for checkpoint in sorted(found, key=lambda c: numbers_of(c.step), reverse=True):
        series, number = checkpoint.series, single_number(checkpoint.step)
        if series not in floors:
            known = newest_candidate(view, msgspec.structs.replace(wanted, series=series))
            floors[series] = known.id.order if known else ((), 0)
        if numbers_of(checkpoint.step) < floors[series][0]:
            continue
        id = view.current_if_readable(checkpoint) or view.history.next_id(series, checkpoint.step)
        too_late = wanted.before_step is not None and number is not None and number >= wanted.before_step
        if checkpoint.unread is not None and not too_late:
            if sure and series in view.history.series:  # another one is of nobody's training
                raise DeniedError(checkpoint.unread, key=checkpoint.path)
            left.append(checkpoint.path)
            continue
        if id.order <= floors[series] or too_late or view.history.has_verdict(id):
            continue
        left.append(checkpoint.path)
        try:
            if dry_run or _may_be_finished_later(view, checkpoint, work):
                continue
            checked = verify_checkpoint(view, checkpoint, work=work)
            if checked.outcome is Outcome.GOOD and checked.id is not None and _ends_search(view, checked.id, wanted):
                floors[series] = checked.id.order
            left.pop()
        except CouldNotTellError as error:
            if sure and isinstance(error, StorageError) and not isinstance(error, ObjectMissingError):
                raise
    return left


def _ends_search(view: RunView, id: CheckpointId, wanted: Wanted) -> bool:
    """True if what is good may be taken: it is full, or what holds weights only is wanted, too."""
    manifest = view.history.manifest(id)
    return wanted.thinned or manifest is None or not manifest.thinned


def _may_be_finished_later(view: RunView, checkpoint: Checkpoint, work: Work) -> bool:
    """True if a checkpoint is unfinished, and somebody may still write it."""
    unfinished = unfinished_because(view.run.storage, checkpoint, scanner=work.scanner) is not None
    quiet = pause_between_files(checkpoint, view.settings.settle)
    return unfinished and writer_of(view.run, checkpoint, quiet) is not None
