"""Marks of generations whose files were moved aside, or will be: what was meant, and where its files lie."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ckptguard.errors import ObjectExistsError
from ckptguard.records.run import Run, create_record, list_records
from ckptguard.values.ids import (
    RECORDS_FOLDER,
    checkpoint_id,
    is_safe_path,
    parse_id,
    record_name,
    series_folder,
    series_from_folder,
)


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. The mark is written before the move, so that a crash between the two is seen: `signature` tells
    the files that were meant from others that are saved under the same names."""

    top: ClassVar[str]  # the folder in the records
    format: int = 1
    series: str
    step: int | None
    generation: int
    path: str
    files: tuple[str, ...]
    signature: tuple[tuple[str, int, int | None, int | None, str | None], ...]

    @property
    def id(self) -> str:
        """``<step>.<generation>``."""
        return checkpoint_id(self.step, self.generation)

    @property
    def folder(self) -> str:
        """The folder of its files in the records."""
        return mark_folder(self.top, self.series, self.step, self.generation)

    def is_of(self, series: str, step: int | None, generation: int) -> bool:
        """Whether it speaks of this generation, and of paths that stay in the run and out of the records."""
        paths = (*self.files, *(key for key, *_ in self.signature), *(() if self.path == "." else (self.path,)))
        safe = all(is_safe_path(path) and path.split("/")[0] != RECORDS_FOLDER for path in paths)
        return safe and (self.series, self.step, self.generation) == (series, step, generation)


def mark_folder(top: str, series: str, step: int | None, generation: int) -> str:
    """Where a generation's files lie under `top`."""
    return f"{top}/{series_folder(series)}/{record_name(step, generation)}"


def write_once(run: Run, key: str, text: bytes = b"\n") -> bool:
    """Write a mark, or a word about one; False if another process was first."""
    try:
        create_record(run, key, text)
    except ObjectExistsError:
        return False
    return True


def list_marks(run: Run, top: str, suffix: str = ".json") -> list[tuple[str, int | None, int]]:
    """(series, step, generation) of all marks under `top`, sorted by name."""
    found = []
    for folder in list_records(run, top):
        for name in list_records(run, f"{top}/{folder}"):
            parsed = parse_id(name.removesuffix(suffix)) if name.endswith(suffix) else None
            if parsed is not None:
                found.append((series_from_folder(folder), *parsed))
    return found
