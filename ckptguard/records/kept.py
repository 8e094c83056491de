"""Kept copies on storage: which there are, where, and how they were made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import ClassVar

from ckptguard.errors import RecordsError
from ckptguard.records.move_marks import PlaceMark, list_marks, mark_folder
from ckptguard.records.run import Run, as_line, create_record, list_records, read_record, write_once
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import CheckpointId, id_from_record, is_safe_path, series_folder
from ckptguard.values.record_text import decode_record

FOLDER = "kept"
_ASIDE = ".damaged.json"
_TRIES = 2  # a copy without a mark is removed: one that reads wrong is read again first


class KeptCopy(PlaceMark, frozen=True, kw_only=True):
    """One protected copy, under ``<folder>/<path>``; `how` is "link", "reflink" or "copy". Its mark is written last."""

    top: ClassVar[str] = FOLDER
    how: str
    files: tuple[str, ...]  # relative to the run, as in the manifest
    sources: tuple[tuple[int, int | None, int | None, str | None], ...]  # their size, mtime, inode, etag when copied
    kept_at: str
    whole: bool = False  # what was copied was known to be complete: the copy can be judged by itself
    read_at: tuple[int | None, ...] = ()  # the mtimes of its files, once these were read and right; None: of no use

    def lies_in(self, entries: Iterable[Entry]) -> bool:
        """True if these entries of a listing hold every file that was copied, as it was then; others may be there."""
        there = {e.key: e.signature for e in entries}
        return all(there.get(file) == source for file, source in zip(self.files, self.sources, strict=False))

    def is_of(self, entries: Sequence[Entry]) -> bool:
        """True if these entries are of exactly the files that were copied, as they were then."""
        return len(entries) == len(self.files) and self.lies_in(entries)

    def key(self, file: str) -> str:
        """The records key of one of its files."""
        return f"{self.folder}/{file}"

    @property
    def checkpoint_key(self) -> str:
        """The records key of the checkpoint itself, as a trainer would load it."""
        return self.folder if self.path == "." else self.key(self.path)


def kept_folder(id: CheckpointId) -> str:
    """Where the kept copy of a generation lies in the records."""
    return mark_folder(FOLDER, id)


def commit_kept(run: Run, copy: KeptCopy) -> None:
    """Make a copy count, after all of its files are there."""
    create_record(run, f"{copy.folder}.json", copy)


def replace_kept(run: Run, copy: KeptCopy) -> None:
    """Have the mark of a copy say something else of it, in one step."""
    with run.records.upload(f"{copy.folder}.json", replace=True) as upload:
        upload.write(as_line(copy))
        upload.commit()


def read_kept(run: Run, id: CheckpointId) -> KeptCopy | None:
    """The whole kept copy of a generation, or None. A mark of another one, or with unsafe paths, is none."""
    return _read(run, id, ".json")


def set_aside(run: Run, copy: KeptCopy) -> None:
    """Have a copy with damaged files count no more. Its other files are right, and may be all that is left of them."""
    write_once(run, copy.folder + _ASIDE, copy)  # or it was, and the process was killed here
    run.records.remove(copy.folder + ".json")


def reinstate_kept(run: Run, copy: KeptCopy) -> None:
    """Have a copy count that was set aside, now that all of its files are right again."""
    write_once(run, copy.folder + ".json", copy)  # or it was, and the process was killed here
    run.records.remove(copy.folder + _ASIDE)


def read_set_aside(run: Run, id: CheckpointId) -> KeptCopy | None:
    """The copy of a generation that was set aside, if there is one."""
    return _read(run, id, _ASIDE)


def list_set_aside(run: Run) -> list[CheckpointId]:
    """Every generation whose copy was set aside; sorted by name."""
    return list_marks(run, FOLDER, _ASIDE)


def _read(run: Run, id: CheckpointId, suffix: str) -> KeptCopy | None:
    for _ in range(_TRIES):
        text = read_record(run, kept_folder(id) + suffix)
        if text is None:
            return None
        with contextlib.suppress(RecordsError):
            copy = decode_record(text, KeptCopy, "the mark of a kept copy")
            safe = all(is_safe_path(file) for file in copy.files) and (copy.path == "." or is_safe_path(copy.path))
            if safe and copy.id == id:
                return copy
    return None


def list_kept(run: Run) -> list[CheckpointId]:
    """Every generation that has a whole kept copy, or leftovers of one; sorted by name."""
    return [id for folder in list_records(run, FOLDER) for id in _list_folder(run, folder)]


def kept_of_series(run: Run, series: str) -> list[CheckpointId]:
    """The same of one series."""
    return _list_folder(run, series_folder(series))


def _list_folder(run: Run, folder: str) -> list[CheckpointId]:
    names = list_records(run, f"{FOLDER}/{folder}")
    ids = (id_from_record(folder, name.removesuffix(".json")) for name in names)
    return list(dict.fromkeys(id for id in ids if id is not None))
