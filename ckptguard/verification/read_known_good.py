"""The known-good checkpoint for callers that must be sure: what changed is read again before the answer."""

from __future__ import annotations

import msgspec

from ckptguard.errors import ChangedWhileReadError, CouldNotTellError, DeniedError, NoKnownGoodError, StorageFullError
from ckptguard.keep.copies import put_aside
from ckptguard.records.after_seal import note_ctimes
from ckptguard.runs.candidates import first_whole, whole_save
from ckptguard.runs.find_known_good import Candidate, Wanted
from ckptguard.runs.run_view import RunView
from ckptguard.runs.settling import quiet_in
from ckptguard.runs.work import Work
from ckptguard.values.ids import CheckpointId
from ckptguard.values.own_log import log as _log
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import Resave, Verification, verify_checkpoint
from ckptguard.verification.collect_evidence import copy_differs

_JUDGED = Verification(resave=Resave.WAIT)


def read_known_good(view: RunView, wanted: Wanted, work: Work, *, everything: bool = False) -> Candidate | None:
    """Return the best known-good checkpoint, or None. Changed files are verified, and the verdict recorded if possible.

    Files whose ctime alone is another one are compared with their seal, and judged only if they differ. A kept copy is
    always read first, because a user of its path may have written to it. With `everything` all bytes of the answer are
    read. Raises CouldNotTellError if only unreadable ones are left.
    """
    read: set[CheckpointId] = set()  # just now, and right

    def wrong_with(candidate: Candidate) -> str | None:
        if not candidate.in_place:
            return wrong_in_copy(view, candidate, work)
        if candidate.id in read:
            return None
        doubtful = candidate.changed or everything or _touched_differ(view, candidate, work)
        return _wrong_in_place(view, candidate, work, read) if doubtful else None

    def attempt(candidate: Candidate) -> Candidate | str:
        found = whole_save(view.run, candidate, wrong_with)
        if isinstance(found, str):
            _log.warning("%s: trying another checkpoint", found)
        return found

    while True:
        known = len(read)
        found: Candidate | None = None
        try:
            found = first_whole(view, attempt, wanted).offered
        except NoKnownGoodError:
            pass
        except CouldNotTellError:
            if len(read) == known:
                raise
        # A name that was saved again, and is good, is a generation that this search did not know.
        if len(read) == known or (found is not None and found.id in read):
            return found


def _touched_differ(view: RunView, candidate: Candidate, work: Work) -> bool:
    """True if a file whose ctime alone changed holds other bytes than were sealed. If none does, note the ctimes."""
    ctimes = candidate.touched(view.run)
    if not ctimes:
        return False
    files = tuple(file for file in candidate.manifest.files if file.path in ctimes)
    touched = msgspec.structs.replace(candidate.manifest, files=files)
    if copy_differs(view.run.storage, "", touched, scanner=work.scanner) is not None:
        return True
    note_ctimes(view.run, candidate.id, ctimes)
    return False


def _wrong_in_place(view: RunView, candidate: Candidate, work: Work, read: set[CheckpointId]) -> str | None:
    """Return what is wrong with the files in place, or None. `read` gains the good generation found there.

    Files are not judged while they are written: ChangedWhileReadError.
    """
    path = candidate.manifest.path
    present = view.look_again(path)
    checkpoint = None if present is None else quiet_in(view, present)
    if checkpoint is None:
        raise ChangedWhileReadError(f"{path} is being written", key=path)
    try:
        checked, recorded = verify_checkpoint(view, checkpoint, _JUDGED, work=work), True
    except (DeniedError, StorageFullError):
        unrecorded = Verification(resave=Resave.WAIT, record=False)
        checked, recorded = verify_checkpoint(view, checkpoint, unrecorded, work=work), False
    if checked.outcome is Outcome.GOOD and checked.id is not None and (recorded or checked.id == candidate.id):
        read.add(checked.id)
    if checked.outcome is Outcome.GOOD and checked.id == candidate.id:
        return None
    what = "another one" if checked.outcome is Outcome.GOOD else checked.outcome.value
    return f"{path} is {what} now"


def wrong_in_copy(view: RunView, candidate: Candidate, work: Work, *, record: bool = True) -> str | None:
    """Return what is wrong with a candidate's kept copy, which then no longer counts; None if every byte is right."""
    copy = candidate.copy
    assert copy is not None
    wrong = copy_differs(view.run.records, copy.folder + "/", candidate.manifest, scanner=work.scanner)
    if wrong is not None and record:
        put_aside(view.run, copy)
    return wrong
