"""Keep protected copies of checkpoints, so that rotation, overwrites and crashes cannot destroy the last good one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

from msgspec.structs import asdict, replace

from ckptguard.errors import ChangedWhileReadError, CouldNotTellError, ObjectExistsError, StorageError, StorageFullError
from ckptguard.keep.room import fits, full_first, may_link, newest_good
from ckptguard.keep.saved_over import is_saved_over
from ckptguard.layouts import Checkpoint
from ckptguard.records.after_seal import note_ctimes, read_ctimes
from ckptguard.records.kept import (
    KeptCopy,
    commit_kept,
    is_marked,
    kept_folder,
    list_kept,
    read_kept,
    read_set_aside,
    replace_kept,
    set_aside,
)
from ckptguard.records.manifests import read_manifest
from ckptguard.records.pins import FOLDER as PINS
from ckptguard.records.pins import pinned_generations
from ckptguard.records.run import Run, begin_records_elsewhere
from ckptguard.records.who_and_when import utc_now
from ckptguard.runs.file_signatures import other_ctimes
from ckptguard.runs.free_space import SHARED, file_system_of
from ckptguard.runs.publish import Place, copy_within
from ckptguard.runs.removal import remove_record, remove_temporary
from ckptguard.runs.run_view import RunView
from ckptguard.runs.saved_together import RememberedSaves, needed_by_saves
from ckptguard.storage.local.syncs import synced_together
from ckptguard.storage.protocol import Entry, find_entry
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest
from ckptguard.values.record_formats import FORMAT_KEY
from ckptguard.values.temporary_names import SAMPLE

_WEAKEST = ("link", "reflink", "copy")  # a copy with several kinds of files is only as independent as its weakest file


def keep_checkpoint(
    view: RunView,
    checkpoint: Checkpoint,
    id: CheckpointId,
    *,
    how: str | None = None,
    whole: bool = True,
    always: bool = False,
) -> KeptCopy | None:
    """Copy a checkpoint aside under an id. None if copies are off or impossible on this storage, or if there is no
    room.

    - Normally it is a reflink, or else a hard link: it takes no time and no space. A verdict then makes it a full copy.
    - For a path that is overwritten in place it is a full copy, because overwriting changes a link's content, too.
    - Without either it is a full copy, on an object store made by the store itself.
    - Where the next saves would not fit beside a full copy it is a link. A link counts as a copy, too. That of the
      newest good save need not fit, because it takes no space as long as the trainer keeps that save.

    `how` overrides this. `whole`: these are known to be all files. `always`: a link is made without regard to room.

    Raises:
        StorageFullError: a write failed for lack of space. Nothing is left behind.
        ChangedWhileReadError: the copied files are not the listed ones.
    """
    run, settings = view.run, view.settings
    present = read_kept(run, id)
    same = present is not None and (view.history.has_verdict(id) or present.is_of(checkpoint.entries))
    if same or settings.keep == "none":
        if present is not None and whole and not present.whole and _is_as_listed(view, present):
            present = replace(present, whole=True)  # nothing came after it was copied
            replace_kept(run, present)
        return present
    if read_set_aside(run, id) is not None:
        return None  # its whole files may be the last ones, which a repair needs
    if not run.has_shared:
        return None
    if how is None:
        how = settings.keep
        if how == "auto":
            many = checkpoint.bytes > settings.copy_limit
            how = "clone" if not many and is_saved_over(view, checkpoint) else "link"
    if present is not None:
        release(run, id)  # of the same save, before it was finished
    folder = kept_folder(id)
    remove_record(run, folder)  # leftovers of an unfinished copy
    if how == "clone" and _takes_bytes(run, folder, how):
        how = "copy"
    if how == "copy" and not fits(view, checkpoint.bytes, independent=True):
        how = "link"
    if how != "copy" and not fits(view, checkpoint.bytes, independent=False):
        wanted = always or may_link(view, checkpoint, id)
        if not wanted or _takes_bytes(run, folder, how):
            return None
    begin_records_elsewhere(run)
    file_system, place, kept = file_system_of(run.records), Place(run.storage), Place(run.records, folder + "/")
    try:
        # Synced before the mark, which makes them count.
        with (
            SHARED.copying(file_system, checkpoint.bytes if how == "copy" else 0),
            synced_together(run.records.url),
            _links_noted(run, id, how),
        ):
            done = [copy_within(run, place, kept, file, how=how) for file in checkpoint.files]
    except StorageError as error:
        remove_record(run, folder)
        if isinstance(error, StorageFullError):
            SHARED.note_full(file_system)
        raise
    copy = KeptCopy(
        **asdict(id),
        path=checkpoint.path,
        how=min(done, key=_WEAKEST.index, default="copy"),
        files=checkpoint.files,
        sources=tuple(e.signature for e in checkpoint.entries),
        kept_at=utc_now(),
        whole=whole,
    )
    if whole and not _is_as_listed(view, copy):
        remove_record(run, folder)
        raise ChangedWhileReadError(f"{checkpoint.path} changed while it was copied", key=checkpoint.path)
    try:
        commit_kept(run, copy)
    except ObjectExistsError:
        return read_kept(run, id)
    return copy


def _is_as_listed(view: RunView, copy: KeptCopy) -> bool:
    """True if the copied files are the listed ones. A link always is; for other copies the sources must not have
    changed."""
    if copy.how == "link":
        entries = (find_entry(view.run.records, copy.key(file)) for file in copy.files)
        kept = [entry.signature if entry is not None else None for entry in entries]
        if all(one is None or one[2] == source[2] for one, source in zip(kept, copy.sources, strict=True)):
            return kept == list(copy.sources)
    now = view.look_again(copy.path)
    return now is not None and copy.lies_in(now.entries)


def _takes_bytes(run: Run, folder: str, how: str) -> bool:
    """True if a copy made like this certainly shares no bytes. It is tried with a small record of ours."""
    if run.records.root is None:
        return False
    sample = f"{folder}/{SAMPLE.new()}"
    try:
        return run.records.copy(FORMAT_KEY, sample, how=how) == "copy"
    except StorageError:
        return False
    finally:
        with contextlib.suppress(StorageError):
            remove_temporary(run.records, sample)


def release(run: Run, id: CheckpointId) -> None:
    """Remove a kept copy. The mark goes first, so a crash leaves files to collect, never half a copy."""
    folder, copy = kept_folder(id), read_kept(run, id)
    with _links_noted(run, id, "copy" if copy is None else copy.how):
        for key in (folder + ".json", folder + ".damaged.json", folder):
            remove_record(run, key)


def _links_noted(run: Run, id: CheckpointId, how: str) -> contextlib.AbstractContextManager[None]:
    """Note what links that are made or removed do to the sealed files in place."""
    if how != "link" or run.storage.root is None:
        return contextlib.nullcontext()
    manifest = None
    with contextlib.suppress(CouldNotTellError):  # then the files are read once more
        manifest = read_manifest(run, id)
    return own_links_noted(run, manifest, [] if manifest is None else [file.path for file in manifest.files])


@contextlib.contextmanager
def own_links_noted(run: Run, manifest: Manifest | None, paths: Iterable[str]) -> Iterator[None]:
    """Note the ctimes that files in place have after the block, in which we make or remove links to them.

    Only of files to which nothing else happened since their bytes were read, and of which only the ctime changed. Keep
    the block short: what another process does to such a file meanwhile is noted, too.
    """
    before = [] if manifest is None or run.storage.root is None else _untouched(run, manifest, paths)
    yield
    now = ((entry, find_entry(run.storage, entry.key)) for entry in before)
    ctimes = {
        old.key: new.ctime_ns
        for old, new in now
        if new is not None and new.ctime_ns is not None and new.signature == old.signature and new != old
    }
    if manifest is not None and ctimes:
        note_ctimes(run, manifest.id, ctimes)


def _untouched(run: Run, manifest: Manifest, paths: Iterable[str]) -> list[Entry]:
    """Return the files in place to which nothing happened since their bytes were read."""
    there = [entry for path in paths if (entry := find_entry(run.storage, path)) is not None]
    other = other_ctimes(there, manifest)
    noted = read_ctimes(run, manifest.id) if other else {}
    return [entry for entry in there if entry.key not in other or noted.get(entry.key) == entry.ctime_ns]


def put_aside(run: Run, copy: KeptCopy) -> None:
    """Stop using a kept copy whose bytes are wrong. If all of it is links to the files in place, remove it. Otherwise
    its right files may be needed for a repair."""
    if shares_place(run, copy, copy.files):
        release(run, copy.id)
    else:
        set_aside(run, copy)


def shares_place(run: Run, copy: KeptCopy, files: Iterable[str]) -> bool:
    """True if these files of a kept copy are hard links to those in place: the same bytes, and the same damage."""
    return copy.how == "link" and all(_is_linked(run, copy, file) for file in files)


def _is_linked(run: Run, copy: KeptCopy, file: str) -> bool:
    kept = find_entry(run.records, copy.key(file))
    there = find_entry(run.storage, file) if kept is not None else None
    return kept is not None and there is not None and kept.inode is not None and kept.inode == there.inode


def release_unpinned(run: Run, ids: Iterable[CheckpointId]) -> list[CheckpointId]:
    """Remove unwanted kept copies except pinned ones, and the rest of unfinished ones. Returns what was removed."""
    unwanted = list(ids)
    if unwanted:
        run.records.renew(PINS)
    pinned = pinned_generations(run) if unwanted else set()
    removed = [id for id in unwanted if id not in pinned or not is_marked(run, id)]
    for id in removed:
        release(run, id)
    return removed


def trim_kept(view: RunView) -> list[CheckpointId]:
    """Remove kept copies that no rule keeps. Returns them.

    In each series these stay: the newest `keep_good` GOOD ones that were not thinned, the newest GOOD full copy, the
    newest `keep_pending` without a verdict, and pinned ones. A checkpoint that was GOOD before its files were damaged
    counts as GOOD. Of series that are saved together all that their newest `keep_good` good saves consist of stays.
    What may not be whole cannot be verified alone: it goes once its save is gone and a newer one is GOOD.
    """
    run, settings = view.run, view.settings
    unwanted: list[CheckpointId] = []
    needed = needed_by_saves(RememberedSaves(view.reader), settings.keep_good)
    for _, ids in itertools.groupby(list_kept(run), key=lambda id: id.series):
        ordered = sorted(ids, key=lambda id: id.order, reverse=True)
        copies = {id: copy for id in ordered if (copy := read_kept(run, id)) is not None}
        whole = list(copies)
        good = list(full_first(view, [id for id in whole if view.is_good(id)]))
        pending = [id for id in whole if not view.history.has_verdict(id) and not _is_outlived(view, copies[id])]
        harmed = [id for id in ordered if id not in whole and view.is_good(id)]
        harmed = [id for id in harmed if read_set_aside(run, id) is not None]
        own = [id for id in good if copies[id].how != "link"]
        stay = {*good[: settings.keep_good], *own[:1], *pending[: settings.keep_pending], *harmed[: settings.keep_good]}
        stay |= needed.intersection(whole)
        unwanted += [id for id in ordered if id not in stay]
    return release_unpinned(run, unwanted)


def _is_outlived(view: RunView, copy: KeptCopy) -> bool:
    if copy.whole:
        return False
    place, newest = view.checkpoint(copy.path), newest_good(view, copy.series)
    return newest is not None and newest.order > copy.id.order and (place is None or not copy.lies_in(place.entries))
