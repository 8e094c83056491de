"""Turn a kept copy that is a hard link into a full copy, which writes to the trainer's file cannot reach."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ckptguard.decisions.own_bytes import Kept, owes_bytes
from ckptguard.errors import BusyError, CouldNotTellError, StoppedError, StorageFullError
from ckptguard.keep.copies import release_unpinned
from ckptguard.keep.own_links import own_links_noted
from ckptguard.keep.room import fits, has_safe_bytes, own_bytes
from ckptguard.records.kept import KeptCopy, list_kept, read_kept, replace_kept
from ckptguard.records.run import Run
from ckptguard.records.who_and_when import seconds_of
from ckptguard.runs.free_space import SHARED, file_system_of
from ckptguard.runs.lock import run_lock
from ckptguard.runs.publish import Place, publish_file
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import Work
from ckptguard.scan.paced_reader import Pace
from ckptguard.scan.process.low_priority import lower_priority
from ckptguard.storage.protocol import find_entry
from ckptguard.values.manifest import Manifest

_LINK_ONLY = "{path} is kept, but not against being overwritten: {why}"


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
        good = [copy for id in newest_first if view.is_good(id) and (copy := read_kept(run, id)) is not None]
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
    return Kept(bytes=sum(size for size, *_ in copy.sources), at=seconds_of(copy.kept_at))


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
