"""Marks of generations whose files were moved or copied into the records: which files, and where they are.

A mark is written before its files are moved (quarantine, trash), but after they were copied (kept copies).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, TypeVar

import msgspec

from ckptguard.errors import RecordsError
from ckptguard.records.run import Run, list_records, read_record
from ckptguard.values.ids import RECORDS_FOLDER, CheckpointId, Step, id_from_record, is_safe_path
from ckptguard.values.record_formats import MARK
from ckptguard.values.record_text import decode_record


class PlaceMark(msgspec.Struct, frozen=True, kw_only=True):
    """One generation, its `path` in the run, and its `files` there."""

    top: ClassVar[str]  # the folder in the records
    format: int = MARK.writes  # 1: its files have their own names in the records, also on a local disk
    series: str
    step: Step
    generation: int
    path: str
    files: tuple[str, ...]

    @property
    def id(self) -> CheckpointId:
        """The id of the checkpoint."""
        return CheckpointId(self.series, self.step, self.generation)

    @property
    def folder(self) -> str:
        """The records folder of its files."""
        return mark_folder(self.top, self.id)

    def is_about(self, id: CheckpointId) -> bool:
        """True if it is about this generation, and its paths are in the run and outside the records."""
        return self.id == id and _are_in_run((*self.files, *(() if self.path == "." else (self.path,))))


def _are_in_run(paths: Iterable[str]) -> bool:
    return all(is_safe_path(path) and path.split("/")[0] != RECORDS_FOLDER for path in paths)


class Mark(PlaceMark, frozen=True, kw_only=True):
    """One generation that is moved. The mark is written first, so that a crash before the move is noticed.

    `signature` distinguishes the marked files from later saves under the same names.
    """

    signature: tuple[tuple[str, int, int | None, int | None, str | None], ...]

    def is_about(self, id: CheckpointId) -> bool:
        """True if that also holds for the signature."""
        return _are_in_run(key for key, *_ in self.signature) and super().is_about(id)


def mark_folder(top: str, id: CheckpointId) -> str:
    """Return the folder of a generation's files under `top`."""
    return f"{top}/{id.record_path}"


_Kind = TypeVar("_Kind", bound=PlaceMark)


def read_mark(run: Run, kind: type[_Kind], id: CheckpointId, suffix: str = ".json") -> _Kind | None:
    """Return the mark of a generation, or None. RecordsError if it is unreadable or not `is_about` that generation."""
    what = f"the mark of {id} of {id.series} in {kind.top}"
    text = read_record(run, mark_folder(kind.top, id) + suffix)
    mark = None if text is None else decode_record(text, kind, what)
    if mark is not None and not mark.is_about(id):
        raise RecordsError(f"{what} is damaged")
    return mark


def list_marks(run: Run, top: str, suffix: str = ".json") -> list[CheckpointId]:
    """Return every generation with a mark under `top`, sorted by name."""
    named = ((folder, name) for folder in list_records(run, top) for name in list_records(run, f"{top}/{folder}"))
    ids = (id_from_record(folder, name.removesuffix(suffix)) for folder, name in named if name.endswith(suffix))
    return [id for id in ids if id is not None]
