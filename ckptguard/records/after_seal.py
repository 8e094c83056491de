"""What was found of the files of a generation after its seal, by path in the run: MD5s and ctimes.

- MD5s, because the first verdict beside training does without them.
- The ctimes of files that hold what was sealed, where something changed a ctime since: chmod, a link, a rename. A
  process that reads the bytes of such a file notes the ctime that it had before, so that no other process has to read
  it again. The record saves work and nothing else: without it, the file is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec

from ckptguard.errors import CouldNotTellError, RecordsError
from ckptguard.records.run import Run, read_parsed, read_sound, record_names, replace_record, write_once
from ckptguard.values.ids import CheckpointId, id_from_record
from ckptguard.values.record_formats import PLAIN

MD5S, CTIMES = "md5", "ctimes"  # their folders


class _Md5s(msgspec.Struct, frozen=True, kw_only=True):
    format: int = PLAIN.writes
    files: dict[str, str]


class _Ctimes(msgspec.Struct, frozen=True, kw_only=True):
    format: int = PLAIN.writes
    files: dict[str, int]


def read_late_md5s(run: Run, id: CheckpointId) -> dict[str, str]:
    """Return the MD5 of each file of a generation. {} if none was taken after the seal."""
    found = read_sound(run, late_md5_key(id), _Md5s, "the record of MD5s")
    return {} if found is None else found.files


def record_late_md5s(run: Run, id: CheckpointId, md5s: Mapping[str, str]) -> None:
    """Record the MD5s of all files of a generation, taken in the same reading that found their BLAKE3 as sealed."""
    write_once(run, late_md5_key(id), _Md5s(files=dict(md5s)))


def late_md5_ids(run: Run) -> set[CheckpointId]:
    """Return the generations with such a record, from one listing of names."""
    found = (key.removesuffix(".json").partition("/") for key in record_names(run, MD5S) if key.endswith(".json"))
    return {id for folder, _, name in found if (id := id_from_record(folder, name)) is not None}


def late_md5_key(id: CheckpointId) -> str:
    """Return the key of that record."""
    return f"{MD5S}/{id.record_path}.json"


def read_ctimes(run: Run, id: CheckpointId) -> dict[str, int]:
    """Return the noted ctime of each file of a generation, in ns."""
    with contextlib.suppress(RecordsError):
        found = read_parsed(run, f"{CTIMES}/{id.record_path}.json", _Ctimes, "the record of ctimes")
        return {} if found is None else found.files
    return {}


def note_ctimes(run: Run, id: CheckpointId, ctimes: Mapping[str, int]) -> None:
    """Note the ctimes that files had before their bytes were read, and were as sealed. What is known of others
    stays."""
    with contextlib.suppress(CouldNotTellError):  # a read-only run, or a full disk
        known = read_ctimes(run, id)
        if not ctimes.items() <= known.items():
            replace_record(run, f"{CTIMES}/{id.record_path}.json", _Ctimes(files={**known, **ctimes}))
