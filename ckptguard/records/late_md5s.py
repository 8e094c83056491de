"""MD5s that were taken after the seal, because the first verdict beside training does without them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ckptguard.records.run import Run, read_sound, record_names, write_once
from ckptguard.values.ids import CheckpointId, id_from_record
from ckptguard.values.record_formats import PLAIN

FOLDER = "md5"


class _Md5s(msgspec.Struct, frozen=True, kw_only=True):
    format: int = PLAIN.writes
    files: dict[str, str]


def read_late_md5s(run: Run, id: CheckpointId) -> dict[str, str]:
    """Return the MD5 of each file of a generation, by its path in the run. {} if none was taken after the seal."""
    found = read_sound(run, late_md5_key(id), _Md5s, "the record of MD5s")
    return {} if found is None else found.files


def record_late_md5s(run: Run, id: CheckpointId, md5s: Mapping[str, str]) -> None:
    """Record the MD5s of all files of a generation, taken in the same reading that found their BLAKE3 as sealed."""
    write_once(run, late_md5_key(id), _Md5s(files=dict(md5s)))


def late_md5_ids(run: Run) -> set[CheckpointId]:
    """Return the generations with such a record, from one listing of names."""
    found = (key.removesuffix(".json").partition("/") for key in record_names(run, FOLDER) if key.endswith(".json"))
    return {id for folder, _, name in found if (id := id_from_record(folder, name)) is not None}


def late_md5_key(id: CheckpointId) -> str:
    """Return the key of that record."""
    return f"{FOLDER}/{id.record_path}.json"
