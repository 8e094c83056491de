"""Verify a kept copy by itself, if its save was deleted or overwritten before its verdict."""

from __future__ import annotations

import msgspec

from ckptguard.errors import BusyError, ChangedWhileReadError, CouldNotTellError
from ckptguard.keep.copies import release
from ckptguard.layouts import Checkpoint, find_checkpoints
from ckptguard.records.kept import KeptCopy, read_kept
from ckptguard.runs.lock import run_lock
from ckptguard.runs.results import Checked
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import is_untouched
from ckptguard.runs.work import PLAIN, Work
from ckptguard.scan import ScanOptions
from ckptguard.values.manifest import Manifest
from ckptguard.verification.checkpoint import (
    FULLY,
    NEW_GENERATION,
    Read,
    ReadContent,
    Verification,
    change_of,
    judge_and_record,
    spares_md5,
)
from ckptguard.verification.damage_or_resave import Change
from ckptguard.verification.found_sums import find_sums

_RACES = 4  # other processes may seal the same checkpoint meanwhile; then try again


def verify_kept(view: RunView, copy: KeptCopy, *, work: Work = PLAIN) -> Checked | None:
    """Read a kept copy that has no verdict, and record one for its generation, as if its files were in place.

    None if it has nothing to say: it was overwritten, equals an earlier generation, or may be damage of one. Then it is
    released. Raises CouldNotTellError and its kinds if it cannot be read.
    """
    checkpoint = _as_it_was(view, copy)
    how = FULLY if checkpoint is None else Verification(md5=not spares_md5(view, checkpoint.bytes, work))
    read = _read(view, copy, checkpoint, how, work) if checkpoint is not None else None
    if checkpoint is None or read is None:
        _release(view, copy)
        return None
    for _ in range(_RACES):
        view.refresh(copy.series)
        if view.history.has_verdict(copy.id):
            return None
        before = _sealed_before(view, copy)
        change = change_of(view, checkpoint, read.scan, before) if before is not None else Change.RESAVED
        own = before is not None and before.id == copy.id  # its writer has sealed it
        if (change is Change.SAME) is not own or change not in (Change.SAME, *NEW_GENERATION):
            _release(view, copy)
            return None
        try:
            grew_from = before.id if before is not None and change is Change.GREW else None
            content = ReadContent(copy.id, before if own else None, change, grew_from)
            return judge_and_record(view, checkpoint, read, how, content)
        except BusyError:
            continue
    raise CouldNotTellError(f"other processes kept sealing {copy.path} at the same time")


def _as_it_was(view: RunView, copy: KeptCopy) -> Checkpoint | None:
    """Return the copied checkpoint, as it was listed then."""
    found = find_checkpoints(copy.entries, view.run.patterns, (copy.path,), (copy.series,))
    return next((c for c in found if (c.path, c.series, c.step) == (copy.path, copy.series, copy.step)), None)


def _read(view: RunView, copy: KeptCopy, checkpoint: Checkpoint, how: Verification, work: Work) -> Read | None:
    """Read its bytes, under the names and times of the copied files. None if they are not those."""
    run = view.run
    before = run.records.list(copy.folder, recursive=True)
    if not is_untouched(run, copy, copy.sizes):
        return None
    sums = find_sums(run.records, checkpoint, key=copy.key)
    options = sums.added_to(ScanOptions(md5=how.md5, yield_for=work.yield_for))
    scan = work.scanner(run.records, [copy.key(file) for file in copy.files], options, work.progress)
    if run.records.list(copy.folder, recursive=True) != before:
        raise ChangedWhileReadError(f"the kept copy of {copy.path} changed while it was read", key=copy.folder)
    as_copied = zip(scan.files, copy.entries, strict=True)
    files = tuple(msgspec.structs.replace(found, entry=entry) for found, entry in as_copied)
    return Read(msgspec.structs.replace(scan, files=files), sums, how.md5)


def _sealed_before(view: RunView, copy: KeptCopy) -> Manifest | None:
    """Return the newest generation sealed for this path up to it, unless that was quarantined."""
    history = view.history
    for id in reversed(history.generations(copy.series, copy.step)):
        if id.generation <= copy.generation and history.is_quarantined(id):
            return None
        if id.generation <= copy.generation and history.is_sealed(id):
            manifest = history.manifest(id)
            if manifest is None or manifest.path == copy.path:
                return manifest
    return None


def _release(view: RunView, copy: KeptCopy) -> None:
    with run_lock(view.run):
        if read_kept(view.run, copy.id) == copy:
            release(view.run, copy.id)
