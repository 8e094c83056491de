"""Protect: keep a finished save before it is verified, for the trainer may delete it at any moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ckptguard.errors import BusyError, CouldNotTellError, ObjectMissingError
from ckptguard.keep.copies import keep_checkpoint, trim_kept
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.runs.lock import run_lock
from ckptguard.runs.run_view import RunView
from ckptguard.verify.collect_evidence import unfinished_because


def protect_finished(view: RunView) -> list[str]:
    """Protect every save of a run that is finished and has no verdict; returns sentences about what went wrong.

    For a trainer that knows a save is complete: it need not wait until a daemon has seen it.
    """
    newest = sorted(view.checkpoints, key=lambda c: -(c.step or 0))[: view.settings.keep_pending]
    return protect(view, [c for c in newest if unfinished_because(view.run.storage, c) is None])


def protect(view: RunView, finished: Iterable[Checkpoint]) -> list[str]:
    """Keep finished saves that have no verdict, the newest `keep_pending` of each series: more would not stay.

    What was sealed before and changed is not kept: it may be damage. Returns sentences about what went wrong.
    """
    if view.settings.keep == "none":
        return []
    troubles: list[str] = []
    kept: Counter[str] = Counter()
    for checkpoint in sorted(finished, key=lambda c: (-(c.step or 0), c.path)):
        if kept[checkpoint.series] >= view.settings.keep_pending:
            continue
        try:
            kept[checkpoint.series] += _protect(view, checkpoint)
        except ObjectMissingError:
            continue  # rotated away under our hands
        except (BusyError, CouldNotTellError) as error:
            troubles.append(f"{checkpoint.path} could not be kept: {error.message}")
    return troubles


def _protect(view: RunView, checkpoint: Checkpoint) -> bool:
    """Keep one of them; whether it has a copy that waits for its verdict."""
    current = view.current_if_readable(checkpoint)
    if current is not None and not LAYOUTS[checkpoint.layout].sealed_by_writer:
        return False
    if checkpoint.step is None:
        return False  # without a step it is never known-good
    id = current or view.history.next_id(checkpoint.series, checkpoint.step)
    with run_lock(view.run):
        copy = keep_checkpoint(view, checkpoint, id)
        trim_kept(view)
    return copy is not None and not view.history.has_verdict(id)
