"""Make kept copies before a verdict, because the trainer may delete a save at any time. Then keep what the verdicts
ask for, as full copies where links are not enough: writes to the trainer's file reach a hard link."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ckptguard.decisions.room import Kept, owes_bytes
from ckptguard.errors import (
    BusyError,
    ChangedWhileReadError,
    CouldNotTellError,
    ObjectMissingError,
    StoppedError,
    StorageFullError,
)
from ckptguard.keep.copies import keep_checkpoint, own_links_noted, release, release_unpinned, trim_kept
from ckptguard.keep.room import fits, full_first, has_safe_bytes, own_bytes
from ckptguard.layouts import LAYOUTS, Checkpoint, tops
from ckptguard.records.kept import KeptCopy, list_kept, read_kept, replace_kept
from ckptguard.records.run import Run
from ckptguard.records.who_and_when import seconds_of
from ckptguard.runs.file_signatures import late_state, looks_as_read
from ckptguard.runs.free_space import SHARED, file_system_of
from ckptguard.runs.lock import run_lock
from ckptguard.runs.publish import Place, copy_files_within, give_names_of, publish_file, staging
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import kept_matches, made_of_sealed
from ckptguard.runs.work import PLAIN, Work, noted
from ckptguard.scan.paced_reader import Pace
from ckptguard.scan.process.low_priority import lower_priority
from ckptguard.storage.protocol import Entry, find_entry
from ckptguard.values.ids import CheckpointId, Step, numbers_of
from ckptguard.values.manifest import Manifest
from ckptguard.values.temporary_names import ROLLBACK
from ckptguard.values.verdict import Outcome
from ckptguard.verification.collect_evidence import copy_differs, unfinished_because

_UNCHECKED = "kept copies could not be checked"
_LINK_ONLY = "{path} is kept, but not against being overwritten: {why}"


def protect_finished(view: RunView) -> list[str]:
    """Protect finished saves that have no verdict, for a trainer that knows that one is finished. Returns problems as
    sentences."""
    newest = sorted(view.checkpoints, key=lambda c: numbers_of(c.step), reverse=True)[: view.settings.keep_pending]
    troubles = protect(view, [(c, True) for c in newest if unfinished_because(view.run.storage, c) is None])
    _trim(view, troubles)
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
        went = contextlib.suppress(ChangedWhileReadError, ObjectMissingError)  # or was overwritten, by the trainer
        with noted(troubles, f"{checkpoint.path} could not be kept"), went:
            kept[checkpoint.series] += _protect(view, checkpoint, whole, troubles)
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
            troubles.append(_LINK_ONLY.format(path=checkpoint.path, why=error.message))
    return copy is not None and not view.history.has_verdict(id)


def restore_pending_copies(view: RunView, *, series: str) -> list[str]:
    """Copy kept copies without a verdict back to their paths if these are empty. Returns the paths.

    A trainer's rotation may have left nothing else. They stay pending there.
    """
    run, places = view.run, list[str]()
    if not run.has_shared:
        return places
    with run_lock(run):
        view.refresh(series)
        for id in list_kept(run):
            wanted = id.series == series and not view.history.has_verdict(id)
            copy = read_kept(run, id) if wanted else None
            if copy is None or copy.path == "." or any(find_entry(run.storage, t) for t in tops(copy.path, copy.files)):
                continue
            with staging(run.storage, ROLLBACK) as staged:
                copy_files_within(run, Place(run.records, copy.folder + "/"), staged.place, copy.files)
                give_names_of(staged.place, copy.path, copy.files, copy.path)
                places.append(copy.path)
    for path in places:
        view.look_again(path)
    return places


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
    troubles: list[str] = []
    copies = [c for c in view.waiting_copies(checkpoint.series) if c.path == checkpoint.path and c.id != id]
    wrong = [c.id for c in copies if c.lies_in(checkpoint.entries)]
    if wrong:
        with noted(troubles, _UNCHECKED), run_lock(view.run):
            release_unpinned(view.run, wrong)
    return troubles


def finish_copies(view: RunView, *, work: Work = PLAIN, saved_over: bool = False) -> list[str]:
    """Keep exactly the copies that the verdicts ask for, and make full copies where they are due. Returns problems.

    `saved_over` is as for `copy_independently`.
    """
    troubles: list[str] = []
    doubtful: list[tuple[KeptCopy, Manifest]] = []
    with noted(troubles, _UNCHECKED), run_lock(view.run):
        doubtful = _release_refuted(view, troubles)
    for doubted, judged in doubtful:
        with noted(troubles, _UNCHECKED):
            _settle_doubtful(view, doubted, judged, work)
    all_known = not troubles
    with noted(troubles, _UNCHECKED), run_lock(view.run):
        for checkpoint, id in list(_good_without_copy(view)):
            with noted(troubles, _UNCHECKED):
                keep_checkpoint(view, checkpoint, id)
    if all_known:
        _trim(view, troubles)
    with noted(troubles, _UNCHECKED):
        troubles += copy_independently(view, work, saved_over=saved_over)
    if all_known:
        _trim(view, troubles)
    return list(dict.fromkeys(troubles))


def _trim(view: RunView, troubles: list[str]) -> None:
    """Remove the copies that no rule keeps. Never call it while a copy is doubtful: it would count as a good one, and
    the older good one would be removed."""
    with noted(troubles, _UNCHECKED), run_lock(view.run):
        trim_kept(view)


def _release_refuted(view: RunView, troubles: list[str]) -> list[tuple[KeptCopy, Manifest]]:
    """Release copies whose content is not what a verdict calls good. Returns copies that must be read first.

    The files of those look different. A touched file has another time and the same bytes.
    """
    run, unwanted, doubtful = view.run, list[CheckpointId](), list[tuple[KeptCopy, Manifest]]()
    for id in list_kept(run):
        with noted(troubles, _UNCHECKED):
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
        there = (
            s.id for s in current_verdicts if s.outcome is Outcome.GOOD and (s.id in listed or s.id.step in by_step)
        )
        left = view.settings.keep_good
        for id in full_first(view, sorted(there, key=lambda id: id.order, reverse=True)):
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
    late = manifest is not None and late_state(checkpoint.files, manifest, checkpoint.entries)
    return not late and _looks_sealed(view, checkpoint, id)


def _looks_sealed(view: RunView, checkpoint: Checkpoint, id: CheckpointId) -> bool:
    manifest = view.history.manifest(id)
    return manifest is not None and looks_as_read(checkpoint.entries, manifest, view.history.verdict(id))


def copy_independently(view: RunView, work: Work, *, saved_over: bool) -> list[str]:
    """Make the newest good kept copy of each series a full copy where that is due and the next saves still fit. Returns
    problems as sentences.

    `saved_over`: a file of the run was overwritten in place. The run is not locked meanwhile, and the copying thread
    has low priority.
    """
    run, settings, troubles = view.run, view.settings, list[str]()
    if settings.keep not in ("auto", "copy"):  # a copy that had no space is a link until there is some
        return []
    for _, ids in itertools.groupby(list_kept(run), key=lambda id: id.series):
        newest_first = sorted(ids, key=lambda id: id.order, reverse=True)
        judged = full_first(view, [id for id in newest_first if view.is_good(id)])
        good = [copy for id in judged if (copy := read_kept(run, id)) is not None]
        own = next((_kept(copy) for copy in good if copy.how != "link"), None)
        for copy in itertools.takewhile(lambda copy: copy.how == "link", good):
            manifest = view.history.manifest(copy.id)
            if manifest is None or not owes_bytes(_kept(copy), own, settings, saved_over=saved_over):
                break
            if not _has_room(view, copy, [older for older in good if older.id.order < copy.id.order]):
                break
            try:
                wrong = _beside_training(functools.partial(_replace_links, view, copy, manifest, work))
            except StoppedError:
                return troubles  # stopped without an error: the next pass does it
            except (BusyError, CouldNotTellError) as error:
                if not _is_there(run, copy):
                    continue  # it is kept no longer: the next pass makes another one
                troubles.append(_LINK_ONLY.format(path=copy.path, why=error.message))
                break
            if wrong is None:
                break
            troubles.append(_LINK_ONLY.format(path=copy.path, why=wrong))  # an older one may be right
    return troubles


def _is_there(run: Run, copy: KeptCopy) -> bool:
    """True if nobody removed a kept copy, or a part of it."""
    return read_kept(run, copy.id) == copy and all(find_entry(run.records, copy.key(file)) for file in copy.files)


def _beside_training(copying: Callable[[], str | None]) -> str | None:
    """Run the copying in a thread of low priority, so that training comes first."""
    with ThreadPoolExecutor(1, "ckptguard-copy") as thread:
        thread.submit(lower_priority).result()
        return thread.submit(copying).result()


def _has_room(view: RunView, copy: KeptCopy, older: list[KeptCopy]) -> bool:
    """True if the next saves fit beside a full copy. Older copies go if that makes the room, and if no save can write
    into this one before it is copied."""
    size = _kept(copy).bytes
    if fits(view, size, independent=True):
        return True
    if not has_safe_bytes(view, copy):
        return False
    freed = sum(own_bytes(view.run, one) or 0 for one in older)
    if not fits(view, size - freed, independent=True):
        return False
    with run_lock(view.run):
        for one in reversed(older):
            release_unpinned(view.run, [one.id])
            if fits(view, size, independent=True):
                return True
    return False


def _kept(copy: KeptCopy) -> Kept:
    return Kept(bytes=copy.bytes, at=seconds_of(copy.kept_at))


def _replace_links(view: RunView, copy: KeptCopy, manifest: Manifest, work: Work) -> str | None:
    """Replace each link by a full copy, compared with the manifest while it is copied, then rewrite the mark.

    At each moment a file is the link or the whole copy. Returns what is wrong with the bytes.
    """
    run = view.run
    inodes = {file: inode for file, (_, _, inode, _) in zip(copy.files, copy.sources, strict=False)}
    kept = Place(run.records, copy.folder + "/")
    linked = [file for file in manifest.files if (e := kept.entry(file.path)) and e.inode == inodes[file.path]]

    def hold() -> None:
        if work.is_stopped():
            raise StoppedError("the copying was stopped", key=copy.folder)

    pace, file_system = Pace(view.settings.verify_rate, hold), file_system_of(run.records)
    with SHARED.copying(file_system, sum(f.size for f in linked)):
        for file in linked:
            try:
                wrong = publish_file(
                    kept, kept, file, pace, replace=True, committing=_while_kept(run, copy, manifest, file.path)
                )
            except StorageFullError:
                SHARED.note_full(file_system)
                raise
            if wrong is not None:
                return wrong
    with run_lock(run):
        if read_kept(run, copy.id) == copy:
            replace_kept(run, msgspec.structs.replace(copy, how="copy", read_at=(None,) * len(copy.files)))
    return None


@contextlib.contextmanager
def _while_kept(run: Run, copy: KeptCopy, manifest: Manifest, path: str) -> Iterator[None]:
    """Hold the run's lock while a copy takes the place of a link. Raises BusyError if the copy is no longer kept."""
    with run_lock(run):
        if read_kept(run, copy.id) != copy:
            raise BusyError("it was released meanwhile")
        with own_links_noted(run, manifest, [path]):
            yield
