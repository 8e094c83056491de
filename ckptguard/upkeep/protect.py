"""Protect: keep a finished save before it is verified, for the trainer may delete it at any moment."""

from __future__ import annotations

from ckptguard.errors import BusyError, CouldNotTellError, ObjectMissingError
from ckptguard.keep.copies import keep_checkpoint, trim_kept
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.run import Run
from ckptguard.runs.history import History, load_history
from ckptguard.runs.listing import list_checkpoints
from ckptguard.runs.lock import run_lock
from ckptguard.values.settings import Settings
from ckptguard.verify.collect_evidence import unfinished_because


def protect_finished(run: Run, settings: Settings) -> list[str]:
    """Protect every save of a run that is finished and has no verdict; returns sentences about what went wrong.

    For a trainer that knows a save is complete: it need not wait until a daemon has seen it.
    """
    history = load_history(run)
    troubles = []
    for checkpoint in sorted(list_checkpoints(run), key=lambda c: -(c.step or 0))[: settings.keep_pending]:
        if unfinished_because(run.storage, checkpoint) is None:
            troubles += protect(run, history, checkpoint, settings)
    return troubles


def protect(run: Run, history: History, checkpoint: Checkpoint, settings: Settings) -> list[str]:
    """Keep one finished save that has no verdict. What was sealed before and changed is not kept: it may be damage."""
    if history.current_if_readable(checkpoint.series, checkpoint.step, checkpoint.path) is not None and not (
        LAYOUTS[checkpoint.layout].sealed_by_writer
    ):
        return []
    if checkpoint.step is None:
        return []  # without a step it is never known-good
    try:
        with run_lock(run):
            current = history.current_if_readable(checkpoint.series, checkpoint.step, checkpoint.path)
            generation = current[1] if current else history.next_generation(checkpoint.series, checkpoint.step)
            keep_checkpoint(run, checkpoint, generation, settings)
            trim_kept(run, history, settings)
    except ObjectMissingError:
        return []  # rotated away under our hands
    except (BusyError, CouldNotTellError) as error:
        return [f"{checkpoint.path} could not be kept: {error.message}"]
    return []
