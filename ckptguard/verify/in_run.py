"""Verify checkpoints of a run: each when it is quiet, and its verdict recorded where that is possible."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from ckptguard.errors import ChangedWhileReadError, CouldNotTellError, DeniedError, StorageFullError
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.run_settings import allow_nonfinite
from ckptguard.runs.pointers import pointer_notes
from ckptguard.runs.results import Checked, Report, pending, relative_to
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import wait_until_quiet
from ckptguard.runs.target import Target
from ckptguard.runs.work import PLAIN, Work
from ckptguard.values.manifest import Manifest
from ckptguard.verify.checkpoint import Verification, verify_checkpoint
from ckptguard.verify.selection import Selection


def verify_in_run(
    target: Target, chosen: Sequence[Checkpoint], what: Selection, reference: Manifest | None, work: Work = PLAIN
) -> Report:
    """Verify these checkpoints of a target that is a run, or lies in one: one after the other, through its view."""
    view, one = target.view, target.checkpoint
    how = Verification(record=what.record, reference=reference)
    assert view is not None
    notes: list[str] = []
    if how.record and view.settings.allow_nonfinite:
        try:
            allow_nonfinite(view.run, view.settings.allow_nonfinite)
        except CouldNotTellError as error:
            notes.append(f"the pattern could not be kept in the run's settings: {error.message}")
    results = []
    could_not_tell = False
    for checkpoint in chosen:
        found, trouble, unsure = _in_run(view, checkpoint, how, what.wait, work)
        results.append(relative_to(found, target.prefix) if one is not None else found)
        if trouble:
            notes.append(trouble)
            how = msgspec.structs.replace(how, record=False)  # the next one could not be recorded either
        could_not_tell = could_not_tell or unsure
    if one is None:
        view.forget()  # pointers are held against what is there at the end
        notes += pointer_notes(view, {c.path: c.outcome for c in results})
    return Report(
        target=target.url,
        kind=target.kind,
        checkpoints=tuple(results),
        notes=tuple(dict.fromkeys(notes)),
        could_not_tell=could_not_tell,
    )


def _in_run(
    view: RunView, checkpoint: Checkpoint, how: Verification, wait: float, work: Work
) -> tuple[Checked, str | None, bool]:
    """(result, why it could not be recorded, could not tell)."""
    quiet: Checkpoint | None = checkpoint
    if not LAYOUTS[checkpoint.layout].sealed_by_writer:  # such a layout is finished by its writer's seal, not by time
        look = functools.partial(view.look_again, checkpoint.path)
        quiet = wait_until_quiet(checkpoint, look, settle=view.settings.settle, limit=wait)
    if quiet is None:
        return pending(checkpoint, "it is still being written"), None, False
    try:
        try:
            return verify_checkpoint(view, quiet, how, work=work), None, False
        except (DeniedError, StorageFullError) as error:
            # Reading works and recording does not: a read-only run, or one on a full disk, still gets its answer.
            found = verify_checkpoint(view, quiet, msgspec.structs.replace(how, record=False), work=work)
            return found, f"verdicts could not be recorded: {error.message}", False
    except ChangedWhileReadError as error:
        return pending(quiet, error.message), None, False
    except CouldNotTellError as error:
        return pending(quiet, error.message), None, True
