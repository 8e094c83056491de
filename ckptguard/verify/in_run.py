"""Verify quiet checkpoints of a run, and record their verdicts where that is possible."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ckptguard.errors import CouldNotTellError, DeniedError, StorageFullError
from ckptguard.layouts import Checkpoint
from ckptguard.records.run_settings import allow_nonfinite
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.values.manifest import Manifest
from ckptguard.verify.checkpoint import Verification, verify_checkpoint
from ckptguard.verify.selection import Selection


def judge_in_run(
    view: RunView, what: Selection, reference: Manifest | None, notes: list[str], work: Work
) -> Callable[[Checkpoint], Checked]:
    """What verifies one checkpoint after the other through a run's view. `notes` gain what could not be recorded."""
    how = Verification(record=what.record, reference=reference)
    if how.record and view.settings.allow_nonfinite:
        try:
            allow_nonfinite(view.run, view.settings.allow_nonfinite)
        except CouldNotTellError as error:
            notes.append(f"the pattern could not be kept in the run's settings: {error.message}")

    def judge(checkpoint: Checkpoint) -> Checked:
        nonlocal how
        try:
            return verify_checkpoint(view, checkpoint, how, work=work)
        except (DeniedError, StorageFullError) as error:
            # Reading works and recording does not: a read-only run, or one on a full disk, still gets its answer.
            unrecorded = msgspec.structs.replace(how, record=False)
            found = verify_checkpoint(view, checkpoint, unrecorded, work=work)
            notes.append(f"verdicts could not be recorded: {error.message}")
            how = unrecorded  # the next one could not be recorded either
            return found

    return judge
