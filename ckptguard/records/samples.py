"""The curve of a training on storage: one record for each guard, written anew whenever there is more.

The next guard of the run takes over what earlier ones wrote, and removes their records.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

import msgspec

from ckptguard.errors import CkptguardError, ObjectMissingError, RecordsError
from ckptguard.records.run import Run, create_record, list_records
from ckptguard.values.curve import Curve, is_sound
from ckptguard.values.record_formats import SAMPLES
from ckptguard.values.record_text import decode_record

FOLDER = "samples"
_MOST_READ = 16  # records of one run; normally there is one
_MOST_TAKEN = 64
_MOST_BYTES = 4 << 20
_NAME = re.compile(r"(?P<token>\d{8}T\d{6}-[0-9a-f]{8})\.(?P<number>\d{6,9})\.json")


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """The curve of a run as one guard knows it. `took`: records of others whose curves are in it."""

    format: int = SAMPLES.writes
    curve: Curve
    took: tuple[str, ...] = ()


def samples_name(token: str, number: int) -> str:
    """Return the name of a guard's record, written for the n-th time."""
    return f"{token}.{number:06d}.json"


def is_of(name: str, token: str) -> bool:
    """True if a record is of this guard."""
    match = _NAME.fullmatch(name)
    return match is not None and match["token"] == token


def superseded(names: Iterable[str]) -> list[str]:
    """Return the names of records of which a newer one exists."""
    found = [name for name in names if _NAME.fullmatch(name)]
    return sorted(set(found) - set(_newest(found)))


def read_samples(run: Run, names: Iterable[str]) -> dict[str, Samples]:
    """Return the records that count, by name, oldest first. Impossible ones and those of a newer format do not."""
    found: dict[str, Samples] = {}
    for name in _newest(names)[-_MOST_READ:]:
        samples, _ = _read(run, f"{FOLDER}/{name}")
        if samples is not None and samples.format <= SAMPLES.reads and is_sound(samples.curve):
            found[name] = samples
    took = {name for samples in found.values() for name in samples.took}
    return {name: samples for name, samples in found.items() if name not in took}


def last_update(run: Run) -> tuple[int, float | None]:
    """Return the step of the last update on record, and when that was written: (0, None) if none can be read."""
    with contextlib.suppress(CkptguardError):
        for name in _newest(list_records(run, FOLDER))[-1:]:
            samples, written_ns = _read(run, f"{FOLDER}/{name}")
            known = samples is not None and samples.format <= SAMPLES.reads
            if samples is not None and known and is_sound(samples.curve) and samples.curve.step:
                return samples.curve.step[-1], None if written_ns is None else written_ns / 1e9
    return 0, None


def write_samples(run: Run, name: str, samples: Samples) -> None:
    """Write a record under a new name. Raises StorageError."""
    create_record(run, f"{FOLDER}/{name}", msgspec.structs.replace(samples, took=samples.took[:_MOST_TAKEN]))


def remove_samples(run: Run, names: Iterable[str]) -> None:
    """Remove records whose curves are in another one. Raises StorageError."""
    for name in names:
        run.records.remove(f"{FOLDER}/{name}")


def _read(run: Run, key: str) -> tuple[Samples | None, int | None]:
    """Return a record and its time; no record if it is gone, too large or none."""
    with contextlib.suppress(ObjectMissingError, RecordsError), run.records.open(key) as reader:
        if reader.entry.size <= _MOST_BYTES:
            text = reader.read(0, reader.entry.size)
            return decode_record(text, Samples, "a record of samples"), reader.entry.mtime_ns
    return None, None


def _newest(names: Iterable[str]) -> list[str]:
    """Return the newest record of each guard, in order."""
    newest: dict[str, tuple[int, str]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            newest[match["token"]] = max(newest.get(match["token"], (0, "")), (int(match["number"]), name))
    return sorted(name for _, name in newest.values())
