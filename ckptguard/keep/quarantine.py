"""Quarantine: move a checkpoint aside, so that a trainer's own "latest" finds the good one."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from ckptguard.errors import ObjectExistsError, ObjectMissingError
from ckptguard.layouts import Checkpoint, tops
from ckptguard.records.clock import utc_now
from ckptguard.records.ledger import append_verdict
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.quarantine import Quarantined, mark_moved, mark_quarantined, read_quarantined, was_moved
from ckptguard.records.run import Run
from ckptguard.runs.history import History, Key, load_history
from ckptguard.runs.listing import find_checkpoint
from ckptguard.runs.lock import run_lock
from ckptguard.values.ids import record_name, series_folder
from ckptguard.values.verdict import Facts, Finding, Outcome, Severity, Verdict
from ckptguard.version import __version__


def quarantine(run: Run, path: str, *, reason: str, suspect: bool = True) -> Key:
    """Move the checkpoint in place under `path` aside; returns its (step, generation).

    With `suspect`, one that was GOOD or had no verdict gets SUSPECT. ObjectMissingError if nothing lies there.
    """
    with run_lock(run):
        checkpoint = find_checkpoint(run, path)
        if checkpoint is None:
            raise ObjectMissingError(f"there is no checkpoint {path} in {run.url}", key=path)
        return quarantine_checkpoint(run, load_history(run), checkpoint, reason=reason, suspect=suspect)


def quarantine_checkpoint(
    run: Run, history: History, checkpoint: Checkpoint, *, reason: str, suspect: bool = True
) -> Key:
    """The same for a caller that holds the lock. The mark is written first: a crash before the move is mended by
    `finish_quarantines`. The next save of that step is a new generation, even with equal bytes."""
    series, step = checkpoint.series, checkpoint.step
    key = history.current_if_readable(series, step, checkpoint.path) or (step, history.next_generation(series, step))
    if suspect:
        mark_suspect(run, history, series, key, reason)
    mark = Quarantined(
        series=series,
        step=step,
        generation=key[1],
        path=checkpoint.path,
        files=(*checkpoint.files, *(e.key for e in checkpoint.irregular)),
        signature=tuple((e.key, *e.signature) for e in checkpoint.entries),
        reason=reason,
        moved_at=utc_now(),
    )
    mark_quarantined(run, mark)
    history.quarantined.setdefault(series, set()).add(key)
    _move(run, mark)
    mark_moved(run, mark)
    return key


def move_aside(run: Run, checkpoint: Checkpoint, key: Key) -> None:
    """Move damaged bytes out of the way of a whole copy of the same generation. The generation itself is not
    quarantined: the copy takes its place. For a caller that holds the lock."""
    folder = f"{QUARANTINE}/{series_folder(checkpoint.series)}/{record_name(*key)}.damaged-{uuid.uuid4().hex[:8]}"
    _move_files(run, checkpoint.path, (*checkpoint.files, *(e.key for e in checkpoint.irregular)), folder)


def finish_quarantines(run: Run, history: History) -> None:
    """Finish moves that a crash cut short. Only what is still byte for byte where and as it was marked is moved: a
    new save under the same name has other times and inodes."""
    for series, keys in history.quarantined.items():
        for key in keys:
            mark = read_quarantined(run, series, *key)
            if mark is None or was_moved(run, mark):
                continue
            if _still_in_place(run, mark):
                _move(run, mark)
            mark_moved(run, mark)


def mark_suspect(run: Run, history: History, series: str, key: Key, reason: str) -> None:
    """SUSPECT for a generation that is GOOD or has no verdict; worse verdicts stand. Where only the place is damaged,
    the suspicion is of the content, which may still lie in a kept copy."""
    before = history.verdict(series, key)
    damaged = before is not None and before.place_damaged and before.content is Outcome.GOOD
    if before is not None and before.outcome is not Outcome.GOOD and not damaged:
        return
    finding = Finding(check="incident", severity=Severity.SICKNESS, message=reason)
    append_verdict(
        run,
        Verdict(
            series=series,
            step=key[0],
            generation=key[1],
            outcome=before.outcome if before and damaged else Outcome.SUSPECT,
            findings=(*(before.findings if before else ()), finding),
            checked_at=utc_now(),
            version=__version__,
            facts=before.facts if before else Facts(),
            place_damaged=damaged,
            content=Outcome.SUSPECT if damaged else None,
        ),
    )
    history.forget_verdicts(load_history(run).names)


def _still_in_place(run: Run, mark: Quarantined) -> bool:
    left = 0
    for key, *signature in mark.signature:
        try:
            if run.storage.stat(key).signature == tuple(signature):
                left += 1
        except ObjectMissingError:
            continue
    return left > 0


def _move(run: Run, mark: Quarantined) -> None:
    _move_files(run, mark.path, mark.files, mark.folder)


def _move_files(run: Run, path: str, files: Sequence[str], folder: str) -> None:
    storage, run_prefix, records_prefix = run.shared()
    # A folder moves in one piece, with what lies nested in it; model files at the run's root move one by one.
    for key in tops(path, files):
        try:
            storage.move(run_prefix + key, f"{records_prefix}{folder}/{key}")
        except ObjectMissingError:
            continue  # moved before a crash, or rotated away meanwhile
        except ObjectExistsError:
            storage.move(run_prefix + key, f"{records_prefix}{folder}.{uuid.uuid4().hex[:8]}/{key}")
