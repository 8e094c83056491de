"""Kept copies on storage: which there are, where, and how they were made."""

from __future__ import annotations

import msgspec

from ckptguard.errors import ObjectExistsError, RecordsError
from ckptguard.records.move_marks import list_marks
from ckptguard.records.run import Run, create_record, list_records, read_record
from ckptguard.values.ids import is_safe_path, parse_id, record_name, series_folder, series_from_folder
from ckptguard.values.record_text import decode_record

FOLDER = "kept"
_ASIDE = ".damaged.json"


class KeptCopy(msgspec.Struct, frozen=True, kw_only=True):
    """One protected copy. Its files lie under ``<folder>/<path>``; `how` is "link", "reflink" or "copy".

    The mark ``<folder>.json`` is written last: files without it are a leftover of a copy that did not finish.
    """

    format: int = 1
    series: str
    step: int | None
    generation: int
    path: str
    how: str
    files: tuple[str, ...]  # relative to the run, as in the manifest
    sources: tuple[tuple[int, int | None, int | None, str | None], ...]  # their size, mtime, inode, etag when copied
    kept_at: str

    @property
    def folder(self) -> str:
        """The folder of this copy in the records."""
        return kept_folder(self.series, self.step, self.generation)

    def key(self, file: str) -> str:
        """The records key of one of its files."""
        return f"{self.folder}/{file}"

    @property
    def checkpoint_key(self) -> str:
        """The records key of the checkpoint itself, as a trainer would load it."""
        return self.folder if self.path == "." else self.key(self.path)


def kept_folder(series: str, step: int | None, generation: int) -> str:
    """Where the kept copy of a generation lies in the records."""
    return f"{FOLDER}/{series_folder(series)}/{record_name(step, generation)}"


def commit_kept(run: Run, copy: KeptCopy) -> None:
    """Make a copy count, after all of its files are there."""
    create_record(run, f"{copy.folder}.json", msgspec.json.encode(copy) + b"\n")


def read_kept(run: Run, series: str, step: int | None, generation: int) -> KeptCopy | None:
    """The kept copy of a generation, if there is a whole one. A mark that names another one, or paths that lead
    elsewhere, is none."""
    return _read(run, series, step, generation, ".json")


def set_aside(run: Run, copy: KeptCopy) -> None:
    """Have a copy with damaged files count no more. Its other files are right, and may be all that is left of them."""
    try:
        create_record(run, copy.folder + _ASIDE, msgspec.json.encode(copy) + b"\n")
    except ObjectExistsError:
        pass  # killed here before
    run.records.remove(copy.folder + ".json")


def reinstate_kept(run: Run, copy: KeptCopy) -> None:
    """Have a copy count that was set aside, now that all of its files are right again."""
    try:
        commit_kept(run, copy)
    except ObjectExistsError:
        pass  # killed here before
    run.records.remove(copy.folder + _ASIDE)


def read_set_aside(run: Run, series: str, step: int | None, generation: int) -> KeptCopy | None:
    """The copy of a generation that was set aside, if there is one."""
    return _read(run, series, step, generation, _ASIDE)


def list_set_aside(run: Run) -> list[tuple[str, int | None, int]]:
    """(series, step, generation) of every copy that was set aside; sorted by name."""
    return list_marks(run, FOLDER, _ASIDE)


def _read(run: Run, series: str, step: int | None, generation: int, suffix: str) -> KeptCopy | None:
    text = read_record(run, kept_folder(series, step, generation) + suffix)
    try:
        copy = decode_record(text or b"", KeptCopy, "the mark of a kept copy")
    except RecordsError:
        return None
    stated = (copy.series, copy.step, copy.generation)
    safe = all(is_safe_path(file) for file in copy.files) and (copy.path == "." or is_safe_path(copy.path))
    return copy if safe and stated == (series, step, generation) else None


def list_kept(run: Run) -> list[tuple[str, int | None, int]]:
    """(series, step, generation) of every kept copy that is whole, or whose leftovers are there; sorted by name."""
    found: dict[tuple[str, int | None, int], None] = {}
    for folder in list_records(run, FOLDER):
        for name in list_records(run, f"{FOLDER}/{folder}"):
            parsed = parse_id(name.removesuffix(".json"))
            if parsed is not None:
                found[(series_from_folder(folder), *parsed)] = None
    return list(found)
