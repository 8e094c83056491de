"""What users decided for one run: tensors that may be non-finite, and checkpoints whose schema was accepted."""

from __future__ import annotations

import re

import msgspec

from ckptguard.errors import ObjectExistsError, RecordsError
from ckptguard.records.run import Run, create_record, list_records, read_record
from ckptguard.values.ids import CheckpointId, parse_id, series_folder
from ckptguard.values.record_text import decode_record

_FOLDER = "settings"
_REFERENCE = "reference"
_NAME = re.compile(r"allow-nonfinite\.(\d{4})\.json")


def allowed_nonfinite(run: Run) -> tuple[str, ...]:
    """All patterns that users ever allowed for this run."""
    patterns: list[str] = []
    for name in sorted(list_records(run, _FOLDER)):
        if _NAME.fullmatch(name):
            try:
                patterns += decode_record(read_record(run, f"{_FOLDER}/{name}") or b"", list[str], name)
            except RecordsError:
                continue
    return tuple(dict.fromkeys(patterns))


def allow_nonfinite(run: Run, patterns: tuple[str, ...]) -> None:
    """Remember patterns for this run, beside those already there."""
    while new := [p for p in patterns if p not in allowed_nonfinite(run)]:
        taken = [int(m[1]) for n in list_records(run, _FOLDER) if (m := _NAME.fullmatch(n))]
        key = f"{_FOLDER}/allow-nonfinite.{max(taken, default=0) + 1:04d}.json"
        try:
            create_record(run, key, msgspec.json.encode(new) + b"\n")
        except ObjectExistsError:
            continue


def accept_reference(run: Run, id: CheckpointId, reason: str) -> None:
    """Remember that the schema of this generation is as it should be."""
    key = f"{_REFERENCE}/{id.record_path}.json"
    try:
        create_record(run, key, msgspec.json.encode({"format": 1, "reason": reason}) + b"\n")
    except ObjectExistsError:
        pass  # accepted before


def accepted_references(run: Run, series: str) -> set[CheckpointId]:
    """Every generation of a series whose schema was accepted."""
    names = list_records(run, f"{_REFERENCE}/{series_folder(series)}")
    parsed = (parse_id(series, name.removesuffix(".json")) for name in names)
    return {p for p in parsed if p is not None}
