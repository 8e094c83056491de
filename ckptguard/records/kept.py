"""Kept copies on storage: which exist, where they are, and how they were made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import ClassVar

from ckptguard.errors import RecordsError
from ckptguard.records.move_marks import PlaceMark, list_marks, mark_folder, read_mark
from ckptguard.records.run import Run, create_record, list_records, replace_record, write_once
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import CheckpointId, id_from_record, series_folder

FOLDER = "kept"
_ASIDE = ".damaged.json"
_TRIES = 2  # a copy without a mark is removed, so a mark that cannot be read is read again first


class KeptCopy(PlaceMark, frozen=True, kw_only=True):
    """One protected copy, at ``<folder>/<path>``. `how` is "link", "reflink" or "copy". Its mark is written last."""

    top: ClassVar[str] = FOLDER
    how: str
    sources: tuple[tuple[int, int | None, int | None, str | None], ...]  # their size, mtime, inode, etag when copied
    kept_at: str
    whole: bool = False  # the copied files are known to be all: the copy can be verified alone
    read_at: tuple[int | None, ...] = ()  # mtimes of its files when they were read and right; None: of no use

    def lies_in(self, entries: Iterable[Entry]) -> bool:
        """True if these entries contain every copied file, as it was then. Other files may be there."""
        there = {e.key: e.signature for e in entries}
        return all(there.get(file) == source for file, source in zip(self.files, self.sources, strict=False))

    def is_of(self, entries: Sequence[Entry]) -> bool:
        """True if these entries are exactly the copied files, as they were then."""
        return len(entries) == len(self.files) and self.lies_in(entries)

    def key(self, file: str) -> str:
        """Return the records key of one of its files."""
        return f"{self.folder}/{file}"

    @property
    def entries(self) -> list[Entry]:
        """The copied files, as they were listed then."""
        return [
            Entry(key=file, kind="file", size=size, mtime_ns=mtime_ns, inode=inode, etag=etag)
            for file, (size, mtime_ns, inode, etag) in zip(self.files, self.sources, strict=True)
        ]

    @property
    def bytes(self) -> int:
        """The size of all copied files."""
        return sum(size for size, *_ in self.sources)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each copied file."""
        return {file: size for file, (size, *_) in zip(self.files, self.sources, strict=False)}

    @property
    def checkpoint_key(self) -> str:
        """The records key of the checkpoint itself, as a trainer would load it."""
        return self.folder if self.path == "." else self.key(self.path)


def kept_folder(id: CheckpointId) -> str:
    """Return the records folder of the kept copy of a generation."""
    return mark_folder(FOLDER, id)


def commit_kept(run: Run, copy: KeptCopy) -> None:
    """Make a copy count, after all of its files exist."""
    create_record(run, f"{copy.folder}.json", copy)


def replace_kept(run: Run, copy: KeptCopy) -> None:
    """Replace the mark of a copy, in one step."""
    replace_record(run, f"{copy.folder}.json", copy)


def read_kept(run: Run, id: CheckpointId) -> KeptCopy | None:
    """Return the whole kept copy of a generation, or None. A mark for another id, or with unsafe paths, is ignored."""
    return _read(run, id, ".json")


def set_aside(run: Run, copy: KeptCopy) -> None:
    """Stop using a copy with damaged files. Its other files are right, and may be the last ones."""
    write_once(run, copy.folder + _ASIDE, copy)  # it may exist if the process was killed here
    run.records.remove(copy.folder + ".json")


def reinstate_kept(run: Run, copy: KeptCopy) -> None:
    """Use a copy again that was set aside, now that all of its files are right."""
    write_once(run, copy.folder + ".json", copy)  # it may exist if the process was killed here
    run.records.remove(copy.folder + _ASIDE)


def read_set_aside(run: Run, id: CheckpointId) -> KeptCopy | None:
    """Return the copy of a generation that was set aside, if there is one."""
    return _read(run, id, _ASIDE)


def list_set_aside(run: Run) -> list[CheckpointId]:
    """Return every generation whose copy was set aside, sorted by name."""
    return list_marks(run, FOLDER, _ASIDE)


def _read(run: Run, id: CheckpointId, suffix: str) -> KeptCopy | None:
    for _ in range(_TRIES):
        with contextlib.suppress(RecordsError):
            return read_mark(run, KeptCopy, id, suffix)
    return None


def list_kept(run: Run) -> list[CheckpointId]:
    """Return every generation with a whole kept copy, or leftovers of one, sorted by name."""
    return [id for folder in list_records(run, FOLDER) for id in _list_folder(run, folder)]


def is_marked(run: Run, id: CheckpointId) -> bool:
    """True if a kept copy was ever finished: it has a mark, also one that cannot be read."""
    names = list_records(run, f"{FOLDER}/{series_folder(id.series)}")
    return f"{id.record_name}.json" in names or f"{id.record_name}.damaged.json" in names


def kept_of_series(run: Run, series: str) -> list[CheckpointId]:
    """Return the same for one series."""
    return _list_folder(run, series_folder(series))


def _list_folder(run: Run, folder: str) -> list[CheckpointId]:
    names = list_records(run, f"{FOLDER}/{folder}")
    ids = (id_from_record(folder, name.removesuffix(".json")) for name in names)
    return list(dict.fromkeys(id for id in ids if id is not None))
