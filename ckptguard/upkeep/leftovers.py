"""Remove what killed processes left: our abandoned temporaries, expired pins, old samples, and parts of saves.

Saves of our own layout leave temporary folders. On an object store they leave claims, objects that were never
sealed, and unfinished uploads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial

from ckptguard.errors import CouldNotTellError, ObjectMissingError
from ckptguard.records.leases import Claim, holds, list_claims, release, surely_gone
from ckptguard.records.pins import counts, list_pins, release_pin
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.rewrites import Rewrite, all_rewrites
from ckptguard.records.run import Run, list_records
from ckptguard.records.samples import FOLDER as SAMPLES
from ckptguard.records.samples import remove_samples, superseded
from ckptguard.records.trash import FOLDER as TRASH
from ckptguard.records.who_and_when import storage_time
from ckptguard.runs.history import history_of_series
from ckptguard.runs.pointers import holds as content_of_pointer
from ckptguard.runs.removal import holds_a_save, holds_checkpoints, remove_leftover, remove_unsealed
from ckptguard.runs.run_view import RunView
from ckptguard.storage import Entry
from ckptguard.storage.remote.remote_storage import end_uploads
from ckptguard.values.ids import RECORDS_FOLDER, folder_of
from ckptguard.values.temporary_names import LEFT_IN_RECORDS, LINK, RECORD, ROLLBACK, SAVE

_LONGEST_COPY = 86400.0  # the longest time in seconds to copy one file between two storages


def collect_leftovers(view: RunView, *, uploads: bool = True) -> list[str]:
    """Remove our old temporaries, expired pins, old samples, and what killed saves left. Returns their keys.

    `uploads`: also what was begun to be uploaded, which a store lists apart. The caller holds the run's lock.
    Everything goes only when it is old. A trainer's own temporaries stay.
    """
    run = view.run
    _settle_names(run)
    removed = []
    with contextlib.suppress(ObjectMissingError):
        inside = run.records.list("", recursive=True)
        tops = {entry.key.split("/")[0] for entry in inside}
        if any(kind.fits(top, "folder") for top in tops for kind in LEFT_IN_RECORDS):
            inside += [entry for entry in run.records.list("") if entry.kind == "folder"]
        for entry in inside:
            if remove_leftover(run.records, entry, LEFT_IN_RECORDS):
                removed.append(f"{RECORDS_FOLDER}/{entry.key}")
    for entry in run.storage.list(""):
        if remove_leftover(run.storage, entry, (ROLLBACK,), holds=partial(holds_checkpoints, view, entry.key)):
            removed.append(entry.key)
    removed += _left_by_rewrites(run)
    for pin in list_pins(run):
        if not counts(run, pin):
            with contextlib.suppress(CouldNotTellError):  # an expired pin does no harm
                release_pin(run, pin)
                removed.append(f"{RECORDS_FOLDER}/{pin.key}")
    with contextlib.suppress(CouldNotTellError):
        old = superseded(list_records(run, SAMPLES))
        remove_samples(run, old)
        removed += [f"{RECORDS_FOLDER}/{SAMPLES}/{name}" for name in old]
    return removed + collect_saves(run, uploads=uploads)


def _left_by_rewrites(run: Run) -> list[str]:
    """Remove what a killed rewrite of a pointer left beside it. It holds the beginning of the old or new content."""
    rewrites: dict[str, list[Rewrite]] = {}
    for rewrite in all_rewrites(run) if run.storage.root is not None else ():
        rewrites.setdefault(folder_of(rewrite.key), []).append(rewrite)
    removed = []
    for folder, own in rewrites.items():
        with contextlib.suppress(ObjectMissingError):
            for entry in run.storage.list(folder):
                kind = LINK if entry.kind == "link" else RECORD
                if remove_leftover(run.storage, entry, (kind,), holds=partial(_is_begun, run, entry, own)):
                    removed.append(entry.key)
    return removed


def _is_begun(run: Run, entry: Entry, rewrites: Iterable[Rewrite]) -> bool:
    """True if one of these rewrites may have begun to write this file or link."""
    is_link = entry.kind == "link"
    content = content_of_pointer(run, entry.key, is_link)
    whole = (one for rewrite in rewrites if rewrite.link == is_link for one in (rewrite.old, rewrite.new))
    return content is not None and any(one.startswith(content) for one in whole)


def _settle_names(run: Run) -> None:
    """Rename records that a killed process moved in but did not rename."""
    if run.records.root is None:
        return
    with contextlib.suppress(ObjectMissingError):
        series = [e.key for top in (QUARANTINE, TRASH) for e in run.records.list(top)]
        for place in (e for folder in series for e in run.records.list(folder) if e.kind == "folder"):
            run.records.settle_names(place.key)


def collect_saves(run: Run, *, uploads: bool = True) -> list[str]:
    """Remove what saves left whose writers have certainly ended. Returns keys and paths. `uploads` is as above.

    On an object store, files without a claim are not ours, and stay.
    """
    removed = []
    if run.storage.root is not None:
        for entry in run.storage.list(""):
            with contextlib.suppress(CouldNotTellError):  # it does no harm, and a training may be about to begin
                if remove_leftover(run.storage, entry, (SAVE,), holds=partial(holds_a_save, run.storage, entry.key)):
                    removed.append(entry.key)
        return removed
    for claim in list_claims(run):
        with contextlib.suppress(CouldNotTellError):
            removed += [claim.path] if collect_claim(run, claim) else []
    with contextlib.suppress(CouldNotTellError):
        removed += _copies_cut_short(run) if uploads else []
    return removed


def collect_claim(run: Run, claim: Claim, *, dead: bool = False) -> bool:
    """Remove a claim and the unsealed files of its writer, if that has ended. True if they were removed.

    `dead`: the caller knows that the writer has ended.
    """
    if not dead and not surely_gone(run, claim):
        return False
    history = history_of_series(run, claim.series)
    sealed = history.current(claim.series, claim.step, claim.path) is not None
    if not sealed and history.next_id(claim.series, claim.step).generation <= claim.generation:
        if not holds(run, claim):
            return False  # another process was faster
        end_uploads(run.storage, claim.path)
        remove_unsealed(run, claim, ("",))
    release(run, claim)
    return True


def _copies_cut_short(run: Run) -> list[str]:
    """Abort our multipart copies that began long ago."""

    def begun_before() -> float | None:
        now = storage_time(run.records)
        return None if now is None else now / 1e9 - _LONGEST_COPY

    return [key for folder in ("kept", "quarantine", "trash") for key in end_uploads(run.records, folder, begun_before)]
