"""User decisions about one run: tensors that may be non-finite, and checkpoints whose schema was accepted."""

from __future__ import annotations

import itertools
import re

from ckptguard.records.run import Run, list_records, read_sound, write_once
from ckptguard.values.ids import CheckpointId, parse_id, series_folder
from ckptguard.values.record_formats import PLAIN

_FOLDER = "settings"
_REFERENCE = "reference"
_NAME = re.compile(r"allow-nonfinite\.(\d{4})\.json")


def allowed_nonfinite(run: Run) -> tuple[str, ...]:
    """Return all patterns that users ever allowed for this run."""
    names = (name for name in sorted(list_records(run, _FOLDER)) if _NAME.fullmatch(name))
    found = (read_sound(run, f"{_FOLDER}/{name}", list[str], name) or [] for name in names)
    return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))


def allow_nonfinite(run: Run, patterns: tuple[str, ...]) -> None:
    """Add patterns for this run to the existing ones."""
    while new := [p for p in patterns if p not in allowed_nonfinite(run)]:
        taken = [int(m[1]) for n in list_records(run, _FOLDER) if (m := _NAME.fullmatch(n))]
        write_once(run, f"{_FOLDER}/allow-nonfinite.{max(taken, default=0) + 1:04d}.json", new)


def accept_reference(run: Run, id: CheckpointId) -> None:
    """Record that the schema of this generation is accepted."""
    write_once(run, f"{_REFERENCE}/{id.record_path}.json", {"format": PLAIN.writes, "reason": "accepted by the user"})


def accepted_references(run: Run, series: str) -> set[CheckpointId]:
    """Return every generation of a series whose schema was accepted."""
    names = list_records(run, f"{_REFERENCE}/{series_folder(series)}")
    parsed = (parse_id(series, name.removesuffix(".json")) for name in names)
    return {p for p in parsed if p is not None}
