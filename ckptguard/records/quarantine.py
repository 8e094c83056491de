"""Quarantine on storage: which generations were moved aside, and why."""

from __future__ import annotations

import msgspec

from ckptguard.errors import ObjectExistsError, RecordsError
from ckptguard.names import (
    RECORDS_FOLDER,
    is_safe_path,
    parse_id,
    record_name,
    series_folder,
    series_from_folder,
)
from ckptguard.record_text import decode_record
from ckptguard.records.run import Run, create_record, list_records, read_record

FOLDER = "quarantine"


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """One generation that was moved aside. The mark is written before the move, so that a crash between the two
    is seen: `signature` then tells whether what still lies in place is what was meant."""

    format: int = 1
    series: str
    step: int | None
    generation: int
    path: str
    files: tuple[str, ...]
    signature: tuple[tuple[str, int, int | None, int | None, str | None], ...]
    reason: str
    moved_at: str

    @property
    def folder(self) -> str:
        """The folder of its files in the records."""
        return f"{FOLDER}/{series_folder(self.series)}/{record_name(self.step, self.generation)}"


def mark_quarantined(run: Run, mark: Quarantined) -> bool:
    """Write the mark; False if this generation was marked before."""
    try:
        create_record(run, mark.folder + ".json", msgspec.json.encode(mark) + b"\n")
    except ObjectExistsError:
        return False
    return True


def mark_moved(run: Run, mark: Quarantined) -> None:
    """Say that the move is done: what lies in place later was put there by somebody."""
    try:
        create_record(run, mark.folder + ".moved", b"\n")
    except ObjectExistsError:
        pass


def was_moved(run: Run, mark: Quarantined) -> bool:
    """Whether the move was finished."""
    return read_record(run, mark.folder + ".moved") is not None


def quarantined_generations(run: Run) -> dict[str, set[tuple[int | None, int]]]:
    """(step, generation) of all marks, by series: their content is no longer in place under its name."""
    found: dict[str, set[tuple[int | None, int]]] = {}
    for folder in list_records(run, FOLDER):
        for name in list_records(run, f"{FOLDER}/{folder}"):
            parsed = parse_id(name.removesuffix(".json")) if name.endswith(".json") else None
            if parsed is not None:
                found.setdefault(series_from_folder(folder), set()).add(parsed)
    return found


def read_quarantined(run: Run, series: str, step: int | None, generation: int) -> Quarantined | None:
    """The mark of a generation, if there is one that can be read and speaks of it, in paths that stay in the run."""
    text = read_record(run, f"{FOLDER}/{series_folder(series)}/{record_name(step, generation)}.json")
    try:
        mark = decode_record(text or b"", Quarantined, "the mark of a quarantined checkpoint")
    except RecordsError:
        return None
    paths = (*mark.files, *(key for key, *_ in mark.signature), *(() if mark.path == "." else (mark.path,)))
    safe = all(is_safe_path(path) and path.split("/")[0] != RECORDS_FOLDER for path in paths)
    return mark if safe and (mark.series, mark.step, mark.generation) == (series, step, generation) else None
