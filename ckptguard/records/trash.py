"""The trash on storage: what retention removed, until its time of grace is over."""

from __future__ import annotations

import msgspec

from ckptguard.errors import ObjectExistsError, ObjectMissingError, RecordsError
from ckptguard.names import (
    RECORDS_FOLDER,
    checkpoint_id,
    is_safe_path,
    parse_id,
    record_name,
    series_folder,
    series_from_folder,
)
from ckptguard.record_text import decode_record
from ckptguard.records.run import Run, create_record, list_records, read_record

FOLDER = "trash"
MOVED, MARKED = "moved", "marked"


class Trashed(msgspec.Struct, frozen=True, kw_only=True):
    """One generation that was removed. `how`: "moved", its files lie under ``<folder>/<path>``; or "marked", they lie
    in place until the time of grace is over. The mark is written first. `signature` tells the files that were meant
    from others that are saved under the same names. `host`, `boot_id` and `uptime` (seconds since the machine's
    start) say when, beside the clock.
    """

    format: int = 1
    series: str
    step: int | None
    generation: int
    path: str
    how: str
    files: tuple[str, ...]
    signature: tuple[tuple[str, int, int | None, int | None, str | None], ...]
    bytes: int
    removed_at: str
    host: str
    boot_id: str
    uptime: float

    @property
    def id(self) -> str:
        """``<step>.<generation>``."""
        return checkpoint_id(self.step, self.generation)

    @property
    def folder(self) -> str:
        """The folder of its files in the records."""
        return trash_folder(self.series, self.step, self.generation)


def trash_folder(series: str, step: int | None, generation: int) -> str:
    """Where a generation's files lie in the trash."""
    return f"{FOLDER}/{series_folder(series)}/{record_name(step, generation)}"


def mark_trashed(run: Run, mark: Trashed) -> bool:
    """Write the mark; False if this generation has one: another process is removing it."""
    try:
        create_record(run, mark.folder + ".json", msgspec.json.encode(mark) + b"\n")
    except ObjectExistsError:
        return False
    return True


def mark_taken(run: Run, mark: Trashed) -> None:
    """Say that its place counts no more: all files were moved to the trash, or those in place are being removed."""
    try:
        create_record(run, mark.folder + ".taken", b"\n")
    except ObjectExistsError:
        pass


def is_taken(run: Run, mark: Trashed) -> bool:
    """Whether its place counts no more."""
    try:
        return run.records.stat(mark.folder + ".taken").kind == "file"
    except ObjectMissingError:
        return False


def unmark_taken(run: Run, mark: Trashed) -> None:
    """Say that its place counts again."""
    run.records.remove(mark.folder + ".taken")


def forget_trashed(run: Run, mark: Trashed) -> None:
    """Remove a generation from the trash, its mark first: killed before the end, it leaves files that nobody takes
    for a checkpoint, and that `remove_unmarked` removes."""
    run.records.remove(mark.folder + ".json")
    unmark_taken(run, mark)
    run.records.remove(mark.folder)


def remove_unmarked(run: Run) -> None:
    """Remove what lies in the trash without a mark. The caller holds the lock: a mark comes before its files."""
    for folder in list_records(run, FOLDER):
        names = set(list_records(run, f"{FOLDER}/{folder}"))
        for name in names:
            own = name.removesuffix(".taken")
            if parse_id(own) is not None and f"{own}.json" not in names:
                run.records.remove(f"{FOLDER}/{folder}/{name}")


def list_trashed(run: Run) -> list[tuple[str, int | None, int]]:
    """(series, step, generation) of all marks, sorted by name."""
    found = []
    for folder in list_records(run, FOLDER):
        for name in list_records(run, f"{FOLDER}/{folder}"):
            parsed = parse_id(name.removesuffix(".json")) if name.endswith(".json") else None
            if parsed is not None:
                found.append((series_from_folder(folder), *parsed))
    return found


def read_trash(run: Run) -> list[Trashed]:
    """All marks. RecordsError if one cannot be read."""
    found = (read_trashed(run, *place) for place in list_trashed(run))
    return [mark for mark in found if mark is not None]


def read_trashed(run: Run, series: str, step: int | None, generation: int) -> Trashed | None:
    """The mark of a generation, or None. RecordsError if it cannot be read, or speaks of another one or of paths that
    lead elsewhere."""
    text = read_record(run, trash_folder(series, step, generation) + ".json")
    if text is None:
        return None
    what = f"the trash mark of {checkpoint_id(step, generation)} of {series}"
    mark = decode_record(text, Trashed, what)
    paths = (*mark.files, *(key for key, *_ in mark.signature), mark.path)
    safe = all(is_safe_path(path) and path.split("/")[0] != RECORDS_FOLDER for path in paths)
    if (
        not safe
        or mark.how not in (MOVED, MARKED)
        or (mark.series, mark.step, mark.generation)
        != (
            series,
            step,
            generation,
        )
    ):
        raise RecordsError(f"{what} is damaged")
    return mark
