"""Quarantine: move a checkpoint aside, so that a trainer's own search for the latest finds the good one."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence

from msgspec.structs import asdict

from ckptguard.errors import DeniedError, ObjectExistsError, ObjectMissingError
from ckptguard.layouts import Checkpoint, tops
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.quarantine import Quarantined, mark_moved, mark_quarantined, read_quarantined, was_moved
from ckptguard.records.run import Run
from ckptguard.records.who_and_when import utc_now
from ckptguard.runs.lock import run_lock
from ckptguard.runs.publish import Place, move_within
from ckptguard.runs.run_view import RunView
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import CheckpointId
from ckptguard.values.record_formats import VERDICT
from ckptguard.values.verdict import Facts, Finding, Outcome, Severity, Verdict
from ckptguard.version import __version__


def quarantine(view: RunView, path: str, *, reason: str, suspect: bool = True) -> CheckpointId:
    """Move the checkpoint at `path` aside. Returns its id. Raises ObjectMissingError if there is none.

    With `suspect`, a checkpoint that was GOOD or had no verdict becomes SUSPECT.
    """
    with run_lock(view.run):
        checkpoint = view.look_again(path)
        if checkpoint is None:
            raise ObjectMissingError(f"there is no checkpoint {path} in {view.run.url}", key=path)
        view.refresh(checkpoint.series)
        return quarantine_checkpoint(view, checkpoint, reason=reason, suspect=suspect)


def quarantine_checkpoint(view: RunView, checkpoint: Checkpoint, *, reason: str, suspect: bool = True) -> CheckpointId:
    """The same for a caller that holds the lock. The next save of that step is a new generation, even with equal bytes.

    The mark comes first: after a crash `finish_quarantines` completes the move. Raises DeniedError for a checkpoint of
    which a part cannot be read, and leaves it as it is.
    """
    run, history = view.run, view.history
    if checkpoint.unread is not None:  # it may be good, and nobody knows its files
        raise DeniedError(checkpoint.unread, key=checkpoint.path)
    id = view.content_id(checkpoint)
    if suspect:
        mark_suspect(view, id, reason)
    mark = Quarantined(
        **asdict(id),
        path=checkpoint.path,
        files=(*checkpoint.files, *(e.key for e in checkpoint.irregular)),
        signature=tuple((e.key, *e.signature) for e in checkpoint.entries),
        reason=reason,
        moved_at=utc_now(),
    )
    mark_quarantined(run, mark)
    history.note_quarantined(id)
    _move_files(run, mark.path, mark.files, mark.folder)
    mark_moved(run, mark)
    view.look_again(checkpoint.path)
    return id


def move_aside(run: Run, checkpoint: Checkpoint, id: CheckpointId) -> None:
    """Move damaged files aside to make room for a whole copy of the same generation, which is not quarantined.

    The caller holds the lock.
    """
    files = (*checkpoint.files, *(e.key for e in checkpoint.irregular))
    _move_files(run, checkpoint.path, files, damaged_folder(id))


def damaged_folder(id: CheckpointId) -> str:
    """Return a new folder in the records' quarantine for the damaged files of a generation."""
    return f"{QUARANTINE}/{id.record_path}.damaged-{uuid.uuid4().hex[:8]}"


def finish_quarantines(view: RunView) -> None:
    """Finish moves that a crash interrupted. Only files exactly as they were marked are moved: a new save under the
    same name has other times and inodes."""
    run = view.run
    for id in itertools.chain.from_iterable(view.history.quarantined.values()):
        mark = read_quarantined(run, id)
        if mark is None or was_moved(run, mark):
            continue
        found = ((find_entry(run.storage, key), tuple(signature)) for key, *signature in mark.signature)
        if any(entry is not None and entry.signature == signature for entry, signature in found):
            _move_files(run, mark.path, mark.files, mark.folder)
        mark_moved(run, mark)


def mark_suspect(view: RunView, id: CheckpointId, reason: str) -> None:
    """Give SUSPECT to a generation that is GOOD or has no verdict. Worse verdicts stay.

    If only the files in place are damaged, the suspicion is about the content, which a kept copy may still hold.
    """
    before = view.history.verdict(id)
    damaged = before is not None and before.place_damaged and before.content is Outcome.GOOD
    if before is not None and before.outcome is not Outcome.GOOD and not damaged:
        return
    finding = Finding(check="incident", severity=Severity.SICKNESS, message=reason)
    view.history.add_verdict(
        Verdict(
            format=VERDICT.writes,
            **asdict(id),
            outcome=before.outcome if before and damaged else Outcome.SUSPECT,
            findings=(*(before.findings if before else ()), finding),
            checked_at=utc_now(),
            version=__version__,
            facts=before.facts if before else Facts(),
            place_damaged=damaged,
            seen=before.seen if before else (),
            content=Outcome.SUSPECT if damaged else None,
        )
    )


def _move_files(run: Run, path: str, files: Sequence[str], folder: str) -> None:
    place = Place(run.storage)
    # A folder is moved as one piece, with everything nested in it. Model files at the run's root are moved one by one.
    for key in tops(path, files):
        try:
            move_within(run, place, Place(run.records, folder + "/"), key)
        except ObjectMissingError:
            continue  # moved before a crash, or deleted by the trainer meanwhile
        except ObjectExistsError:
            move_within(run, place, Place(run.records, f"{folder}.{uuid.uuid4().hex[:8]}/"), key)
