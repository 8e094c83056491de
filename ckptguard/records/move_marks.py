"""Marks of generations whose files were moved or copied into the records: which files, and where they are."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ckptguard.records.run import Run, list_records
from ckptguard.values.ids import RECORDS_FOLDER, CheckpointId, Step, id_from_record, is_safe_path
from ckptguard.values.record_formats import MARK


class PlaceMark(msgspec.Struct, frozen=True, kw_only=True):
    """One generation, and its `path` in the run."""

    top: ClassVar[str]  # the folder in the records
    format: int = MARK.writes  # 1: its files have their own names in the records, also on a local disk
    series: str
    step: Step
    generation: int
    path: str

    @property
    def id(self) -> CheckpointId:
        """The id of the checkpoint."""
        return CheckpointId(self.series, self.step, self.generation)

    @property
    def folder(self) -> str:
        """The records folder of its files."""
        return mark_folder(self.top, self.id)


class Mark(PlaceMark, frozen=True, kw_only=True):
    """One generation that is moved. The mark is written first, so that a crash before the move is noticed.

    `signature` distinguishes the marked files from later saves under the same names.
    """

    files: tuple[str, ...]
    signature: tuple[tuple[str, int, int | None, int | None, str | None], ...]

    def is_of(self, id: CheckpointId) -> bool:
        """True if it is about this generation, and its paths are in the run and outside the records."""
        paths = (*self.files, *(key for key, *_ in self.signature), *(() if self.path == "." else (self.path,)))
        safe = all(is_safe_path(path) and path.split("/")[0] != RECORDS_FOLDER for path in paths)
        return safe and self.id == id


def mark_folder(top: str, id: CheckpointId) -> str:
    """Return the folder of a generation's files under `top`."""
    return f"{top}/{id.record_path}"


def list_marks(run: Run, top: str, suffix: str = ".json") -> list[CheckpointId]:
    """Return every generation with a mark under `top`, sorted by name."""
    named = ((folder, name) for folder in list_records(run, top) for name in list_records(run, f"{top}/{folder}"))
    ids = (id_from_record(folder, name.removesuffix(suffix)) for folder, name in named if name.endswith(suffix))
    return [id for id in ids if id is not None]
