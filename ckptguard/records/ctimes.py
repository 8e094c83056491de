"""The ctimes of files that hold what was sealed, where something changed a file's ctime since: chmod, a link, a rename.

A process that reads the bytes of such a file notes the ctime that it had before, so that no other process has to read
it again. The record saves work and nothing else: without it, the file is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec

from ckptguard.errors import CouldNotTellError, RecordsError
from ckptguard.records.run import Run, read_parsed, replace_record
from ckptguard.values.ids import CheckpointId
from ckptguard.values.record_formats import PLAIN

FOLDER = "ctimes"


class _Ctimes(msgspec.Struct, frozen=True, kw_only=True):
    format: int = PLAIN.writes
    files: dict[str, int]


def read_ctimes(run: Run, id: CheckpointId) -> dict[str, int]:
    """Return the noted ctime of each file of a generation, in ns, by its path in the run."""
    with contextlib.suppress(RecordsError):
        found = read_parsed(run, f"{FOLDER}/{id.record_path}.json", _Ctimes, "the record of ctimes")
        return {} if found is None else found.files
    return {}


def note_ctimes(run: Run, id: CheckpointId, ctimes: Mapping[str, int]) -> None:
    """Note the ctimes that files had before their bytes were read, and were as sealed. What is known of others
    stays."""
    with contextlib.suppress(CouldNotTellError):  # a read-only run, or a full disk
        known = read_ctimes(run, id)
        if not ctimes.items() <= known.items():
            replace_record(run, f"{FOLDER}/{id.record_path}.json", _Ctimes(files={**known, **ctimes}))
