"""Measure the bytes of a run as the disk counts them: checkpoints in place, protected copies, quarantine and trash."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator

from ckptguard.decisions.budget import Space
from ckptguard.errors import ObjectMissingError
from ckptguard.records.kept import FOLDER as KEPT
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.trash import FOLDER as TRASH
from ckptguard.runs.run_view import RunView
from ckptguard.storage import Storage
from ckptguard.storage.protocol import Entry

_BLOCK = 512  # the unit of st_blocks, whatever the file system's block size


def measure_space(view: RunView, present: Collection[str]) -> Space:
    """Return what occupies the bytes of a run. `present` are the checkpoints that count as in place; the others there
    wait in the trash. Raises CouldNotTellError if something cannot be listed."""
    run, named = view.run, dict[str, Hashable]()
    found: list[tuple[Hashable, int, int]] = []
    in_place: dict[str, frozenset[Hashable]] = {}
    for checkpoint in view.checkpoints:
        own = list(_files(run.storage, checkpoint.entries))
        found += [file for _, file in own]
        if checkpoint.path in present:
            in_place[checkpoint.path] = frozenset(file for _, (file, *_) in own)
            named |= {key: file for key, (file, *_) in own}
    held = set[Hashable]()
    for folder in (KEPT, QUARANTINE, TRASH):
        with contextlib.suppress(ObjectMissingError):
            own = list(_files(run.records, run.records.list(folder, recursive=True)))
            found += [file for _, file in own]
            held |= {file for _, (file, *_) in own} if folder != TRASH else set()
    names = Counter(file for file, *_ in found)
    held |= {file for file, _, links in found if links > names[file]}
    return Space(sizes={file: bytes for file, bytes, _ in found}, in_place=in_place, named=named, held=held)


def _files(storage: Storage, entries: Iterable[Entry]) -> Iterator[tuple[str, tuple[Hashable, int, int]]]:
    """Yield each name with its file, the bytes of that, and how many names it has. What went meanwhile is none."""
    for entry in entries:
        if entry.kind != "file":
            continue
        if storage.root is None:
            yield entry.key, ((storage.url, entry.key), entry.size, 1)
            continue
        with contextlib.suppress(FileNotFoundError):
            info = os.lstat(storage.path_of(entry.key))
            yield entry.key, ((info.st_dev, info.st_ino), info.st_blocks * _BLOCK, info.st_nlink)
