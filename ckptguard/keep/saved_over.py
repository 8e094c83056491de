"""See how a trainer saves again under one name: through the same file, or with a new file that replaces it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ckptguard.layouts import Checkpoint
from ckptguard.runs.file_signatures import saved_over
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import seen_when_sealed
from ckptguard.storage.local.birth_time import born_ns
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import Step
from ckptguard.values.manifest import Manifest

_SEEN_TWICE = 3  # contents under one name, of which two replaced another


def is_saved_over(view: RunView, checkpoint: Checkpoint) -> bool:
    """True if this path seems to be overwritten in place: one of its files was written again through its inode."""
    return any(True for _ in _saved_over(view, checkpoint))


def freed_before_writing(view: RunView, checkpoint: Checkpoint) -> int:
    """Return the bytes of the files that were surely overwritten in place. The next save frees them before it writes.

    The inode of a deleted file may be that of a new one, which then was made after the earlier content was written. A
    file of which the system does not know when it was made counts as new.
    """
    storage, freed = view.run.storage, dict[str, int]()
    for entry, written in _saved_over(view, checkpoint):
        if storage.root is not None and written is not None:
            born = born_ns(storage.path_of(entry.key))
            if born is not None and born < written:
                freed[entry.key] = entry.size
    return sum(freed.values())


def _saved_over(view: RunView, checkpoint: Checkpoint) -> Iterator[tuple[Entry, int | None]]:
    waiting = [c for c in view.waiting_copies(checkpoint.series) if c.path == checkpoint.path]
    sealed = _sealed(view, checkpoint.series, checkpoint.step, checkpoint.path)[-2:]
    before = [seen_when_sealed(manifest) for manifest in sealed]
    before += [[(file, *source) for file, source in zip(c.files, c.sources, strict=False)] for c in waiting]
    for contents in before:
        yield from saved_over(contents, checkpoint.entries)


def keeps_old_bytes(view: RunView, series: str, step: Step, path: str) -> bool:
    """True if a hard link to the files of this name is as safe as a copy, because no save writes into them.

    That is so if the last two saves under the name came with new files, or if a numbered name was saved once.
    """
    sealed = _sealed(view, series, step, path)[-_SEEN_TWICE:]
    if any(_shares_files(earlier, later) for earlier, later in pairwise(sealed)):
        return False
    return len(sealed) == _SEEN_TWICE or (step is not None and len(sealed) < 2)


def _sealed(view: RunView, series: str, step: Step, path: str) -> list[Manifest]:
    """Return what was sealed under a name, the oldest first."""
    every = (view.history.manifest(id) for id in view.history.generations(series, step)[-_SEEN_TWICE:])
    return [manifest for manifest in every if manifest is not None and manifest.path == path]


def _shares_files(earlier: Manifest, later: Manifest) -> bool:
    """True if a file of both may be the same one. A file whose inode is unknown may be."""
    inodes = {file.path: file.inode for file in earlier.files}
    pairs = ((inodes[file.path], file.inode) for file in later.files if file.path in inodes)
    return any(before is None or before == now for before, now in pairs)
