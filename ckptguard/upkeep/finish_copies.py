"""Make kept copies before a verdict, because the trainer may delete a save at any time. Then keep what the verdicts
ask for."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from ckptguard.errors import BusyError, ChangedWhileReadError, CouldNotTellError, ObjectMissingError, StorageFullError
from ckptguard.keep.copies import keep_checkpoint, release, release_unpinned, trim_kept
from ckptguard.keep.independent_copies import copy_independently
from ckptguard.layouts import LAYOUTS, Checkpoint
from ckptguard.records.kept import KeptCopy, list_kept, read_kept, replace_kept
from ckptguard.runs.file_signatures import late_state, looks_as_read
from ckptguard.runs.lock import run_lock
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import kept_matches, made_of_sealed
from ckptguard.runs.work import PLAIN, Work
from ckptguard.storage.protocol import Entry, find_entry
from ckptguard.values.ids import CheckpointId, Step, numbers_of
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Outcome
from ckptguard.verification.collect_evidence import copy_differs, unfinished_because


def protect_finished(view: RunView) -> list[str]:
    """Protect finished saves that have no verdict, for a trainer that knows that one is finished. Returns problems as
    sentences."""
    newest = sorted(view.checkpoints, key=lambda c: numbers_of(c.step), reverse=True)[: view.settings.keep_pending]
    troubles = protect(view, [(c, True) for c in newest if unfinished_because(view.run.storage, c) is None])
    try:
        with run_lock(view.run):
            trim_kept(view)
    except (BusyError, CouldNotTellError) as error:
        troubles.append(f"kept copies could not be checked: {error.message}")
    return troubles


def protect(view: RunView, finished: Iterable[tuple[Checkpoint, bool]]) -> list[str]:
    """Keep the newest `keep_pending` finished saves of each series that have no verdict. Returns problems as sentences.

    Each save comes with whether it is known to be whole. Older copies stay until they were verified.
    """
    if view.settings.keep == "none":
        return []
    troubles: list[str] = []
    kept: Counter[str] = Counter()
    for checkpoint, whole in sorted(finished, key=lambda one: (numbers_of(one[0].step), one[0].path), reverse=True):
        if kept[checkpoint.series] >= view.settings.keep_pending:
            continue
        try:
            kept[checkpoint.series] += _protect(view, checkpoint, whole, troubles)
        except (ChangedWhileReadError, ObjectMissingError):
            continue  # the trainer overwrote or deleted it meanwhile
        except (BusyError, CouldNotTellError) as error:
            troubles.append(f"{checkpoint.path} could not be kept: {error.message}")
    return troubles


def _protect(view: RunView, checkpoint: Checkpoint, whole: bool, troubles: list[str]) -> bool:
    """Keep one save. True if it now has a copy that waits for its verdict.

    Sealed content that changed is kept as new content. It may be damage: then its copy is removed with the verdict.
    """
    current, by_writer = view.current_if_readable(checkpoint), LAYOUTS[checkpoint.layout].sealed_by_writer
    if current is not None and not by_writer and _is_sealed_whole(view, checkpoint, current):
        return False
    id = current if current is not None and by_writer else view.new_id(checkpoint)
    with run_lock(view.run):
        try:
            copy = keep_checkpoint(view, checkpoint, id, whole=whole or by_writer)
        except StorageFullError as error:
            copy = keep_checkpoint(view, checkpoint, id, how="link", whole=whole or by_writer)
            troubles.append(f"{checkpoint.path} is kept, but not against being overwritten: {error.message}")
    return copy is not None and not view.history.has_verdict(id)


def waiting_alone(view: RunView) -> list[KeptCopy]:
    """Return the whole kept copies without a verdict whose saves are no longer in place, newest of each series first.

    A save that is now part of a larger checkpoint counts as in place.
    """
    series = sorted({id.series for id in list_kept(view.run)})
    waiting = [copy for one in series for copy in view.waiting_copies(one) if copy.whole]
    there = ((copy, view.checkpoint(copy.path)) for copy in waiting)
    return [copy for copy, place in there if place is None or not copy.lies_in(place.entries)]


def release_other(view: RunView, checkpoint: Checkpoint, id: CheckpointId | None) -> list[str]:
    """Release copies of these files under a new id, if they are what was sealed under `id` or its damage. Returns
    problems as sentences."""
    copies = [c for c in view.waiting_copies(checkpoint.series) if c.path == checkpoint.path and c.id != id]
    wrong = [c.id for c in copies if c.lies_in(checkpoint.entries)]
    try:
        with run_lock(view.run) if wrong else contextlib.nullcontext():
            release_unpinned(view.run, wrong)
    except (BusyError, CouldNotTellError) as error:
        return [f"kept copies could not be checked: {error.message}"]
    return []


def finish_copies(view: RunView, *, work: Work = PLAIN, saved_over: bool = False) -> list[str]:
    """Keep exactly the copies that the verdicts ask for, and make full copies where they are due. Returns problems.

    `saved_over` is as for `copy_independently`.
    """
    troubles: list[str] = []
    doubtful: list[tuple[KeptCopy, Manifest]] = []
    with _noted(troubles), run_lock(view.run):
        doubtful = _release_refuted(view, troubles)
    for doubted, judged in doubtful:
        with _noted(troubles):
            _settle_doubtful(view, doubted, judged, work)
    all_known = not troubles
    with _noted(troubles), run_lock(view.run):
        for checkpoint, id in list(_good_without_copy(view)):
            with _noted(troubles):
                keep_checkpoint(view, checkpoint, id)
    if all_known:
        _trim(view, troubles)
    with _noted(troubles):
        troubles += copy_independently(view, work, saved_over=saved_over)
    if all_known:
        _trim(view, troubles)
    return list(dict.fromkeys(troubles))


@contextlib.contextmanager
def _noted(troubles: list[str]) -> Iterator[None]:
    """Add a problem with one copy as a sentence, so that it does not stop the other copies."""
    try:
        yield
    except (BusyError, CouldNotTellError) as error:
        troubles.append(f"kept copies could not be checked: {error.message}")


def _trim(view: RunView, troubles: list[str]) -> None:
    """Remove the copies that no rule keeps. Never call it while a copy is doubtful: it would count as a good one, and
    the older good one would be removed."""
    with _noted(troubles), run_lock(view.run):
        trim_kept(view)


def _release_refuted(view: RunView, troubles: list[str]) -> list[tuple[KeptCopy, Manifest]]:
    """Release copies whose content is not what a verdict calls good. Returns copies that must be read first.

    The files of those look different. A touched file has another time and the same bytes.
    """
    run, unwanted, doubtful = view.run, list[CheckpointId](), list[tuple[KeptCopy, Manifest]]()
    for id in list_kept(run):
        with _noted(troubles):
            copy, manifest = read_kept(run, id), view.history.manifest(id)
            if copy is None or not view.history.has_verdict(id):
                continue
            if manifest is not None and view.is_good(id):
                if not kept_matches(run, copy, manifest):
                    doubtful.append((copy, manifest))
            elif read_kept(run, id) != copy:
                continue  # unreadable once, and maybe the last whole copy: the next pass checks it again
            elif manifest is not None and not made_of_sealed(copy, manifest):
                release(run, id)  # even if pinned: pins are for sealed content
            else:
                unwanted.append(id)
    release_unpinned(run, unwanted)
    return doubtful


def _settle_doubtful(view: RunView, copy: KeptCopy, manifest: Manifest, work: Work) -> None:
    """Read a copy whose files look different, or were touched or renamed between the seal and the copy. If it holds the
    sealed content, record the times of its files, so that it is read once. Else release it."""
    records = view.run.records
    before = [find_entry(records, copy.key(file)) for file in copy.files]
    wrong = _holds_later_content(view, copy, before) or bool(
        copy_differs(records, copy.folder + "/", manifest, scanner=work.scanner)
    )
    if before != [find_entry(records, copy.key(file)) for file in copy.files]:
        return  # the next pass checks it again
    with run_lock(view.run):
        if read_kept(view.run, copy.id) != copy:
            return
        if not wrong:
            read_at = tuple(entry.mtime_ns if entry is not None else None for entry in before)
            replace_kept(view.run, msgspec.structs.replace(copy, read_at=read_at))
        elif made_of_sealed(copy, manifest):
            release_unpinned(view.run, [copy.id])
        else:
            release(view.run, copy.id)


def _holds_later_content(view: RunView, copy: KeptCopy, entries: Iterable[Entry | None]) -> bool:
    """True if a file of a copy belongs to the later content of its path. It need not be read again."""
    later = view.history.current_if_readable(copy.series, copy.step, copy.path)
    manifest = view.history.manifest(later) if later not in (None, copy.id) else None
    read = {(f.path, f.size, f.mtime_ns, f.inode) for f in (manifest.files if manifest is not None else ())}
    return any(
        e is not None and (file, e.size, e.mtime_ns, e.inode) in read
        for file, e in zip(copy.files, entries, strict=True)
    )


def _good_without_copy(view: RunView) -> Iterator[tuple[Checkpoint, CheckpointId]]:
    """Yield the checkpoints in place without a copy, among the newest `keep_good` good ones of each series."""
    listed = set(list_kept(view.run))
    in_place: dict[str, dict[Step, list[Checkpoint]]] = {}
    for checkpoint in view.checkpoints:
        in_place.setdefault(checkpoint.series, {}).setdefault(checkpoint.step, []).append(checkpoint)
    for series, by_step in in_place.items():
        current_verdicts = view.history.current_verdicts(series).values()
        good = [s.id for s in current_verdicts if s.outcome is Outcome.GOOD]
        left = view.settings.keep_good
        for id in sorted(good, key=lambda id: id.order, reverse=True):
            if left <= 0:
                break
            if id in listed and read_kept(view.run, id) is not None:
                left -= 1
                continue
            own = (c for c in by_step.get(id.step, ()) if view.current_if_readable(c) == id)
            found = next((c for c in own if looks_as_judged(view, c, id)), None)
            if found is not None:  # many may be gone: only existing ones count
                left -= 1
                yield found, id


def looks_as_judged(view: RunView, checkpoint: Checkpoint, id: CheckpointId) -> bool:
    """True if its files look as they did when this generation was verified. A copy of other content would be wrong."""
    return view.history.verdict(id) is not None and _looks_sealed(view, checkpoint, id)


def _is_sealed_whole(view: RunView, checkpoint: Checkpoint, id: CheckpointId) -> bool:
    """True if its files look as they did when they were sealed, and no file with state came later."""
    manifest = view.history.manifest(id)
    late = manifest is not None and late_state(checkpoint.files, manifest)
    return not late and _looks_sealed(view, checkpoint, id)


def _looks_sealed(view: RunView, checkpoint: Checkpoint, id: CheckpointId) -> bool:
    manifest = view.history.manifest(id)
    return manifest is not None and looks_as_read(checkpoint.entries, manifest, view.history.verdict(id))
