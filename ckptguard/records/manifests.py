"""Manifests on storage: one per generation, exclusively created, written last.

If an observer writes the manifest later, the metrics of a save wait for it in their own record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from ckptguard.errors import BusyError, ObjectExistsError, ObjectMissingError, RecordsError, SettingsError
from ckptguard.records.run import Run, create_record, read_record, read_sound, record_names
from ckptguard.values.ids import CheckpointId, parse_id, series_folder
from ckptguard.values.manifest import Manifest, decode_manifest, encode_manifest, split_metrics
from ckptguard.values.record_formats import PLAIN

FOLDER = "manifests"
_METRICS = "metrics"
MOST_METRICS = 1000
_LONGEST_NAME = 200


def manifest_key(id: CheckpointId) -> str:
    """Return the records key of a generation's manifest."""
    return f"{FOLDER}/{id.record_path}.json"


def write_manifest(run: Run, manifest: Manifest) -> None:
    """Commit a manifest. Raises BusyError if another process has sealed this generation meanwhile."""
    key = manifest_key(manifest.id)
    try:
        create_record(run, key, encode_manifest(manifest))
    except ObjectExistsError as error:
        winner = read_manifest(run, manifest.id)
        if winner is not None and winner.nonce == manifest.nonce:
            return  # ours: the first answer was lost
        raise BusyError(f"{manifest.id} of {manifest.series} was sealed by another process") from error


def read_manifest(run: Run, id: CheckpointId) -> Manifest | None:
    """Return the manifest of a generation, or None. Raises RecordsError if it is damaged or too new."""
    text = read_record(run, manifest_key(id))
    if text is None:
        return None
    manifest = decode_manifest(text)
    if manifest.id != id:
        raise RecordsError(f"the manifest of {id} of {id.series} belongs to another checkpoint")
    return manifest


def sealed_generations(run: Run, series: str) -> list[CheckpointId]:
    """Return every generation of a series that has a manifest, in no guaranteed order."""
    names = record_names(run, f"{FOLDER}/{series_folder(series)}")
    ids = (parse_id(series, name.removesuffix(".json")) for name in names if name.endswith(".json"))
    return [id for id in ids if id is not None]


class _Metrics(msgspec.Struct, frozen=True, kw_only=True):
    format: int = PLAIN.writes
    metrics: dict[str, float] = {}
    nonfinite_metrics: dict[str, str] = {}


def checked_metrics(given: Mapping[Any, Any]) -> dict[str, float]:
    """Return named numbers as floats; a tensor of one element is accepted. SettingsError names a wrong one."""
    if len(given) > MOST_METRICS:
        raise SettingsError(f"at most {MOST_METRICS} metrics can be saved with a checkpoint, not {len(given)}")
    found = {}
    for name, value in given.items():
        if not isinstance(name, str) or not is_metric_name(name):
            raise SettingsError(f"a metric's name must be text of 1 to {_LONGEST_NAME} characters, not {name!r:.100}")
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise SettingsError(f"the metric {name!r} must be a number, not a {type(value).__name__}") from error
    return found


def is_metric_name(name: str) -> bool:
    """True if a name can be recorded."""
    return 1 <= len(name) <= _LONGEST_NAME and not any("\ud800" <= c <= "\udfff" for c in name)


def write_metrics(run: Run, id: CheckpointId, metrics: Mapping[str, float]) -> None:
    """Record the metrics of a generation that is about to be saved, instead of those of a failed save."""
    finite, words = split_metrics(metrics)
    forget_metrics(run, id)
    create_record(run, _key(id), _Metrics(metrics=finite, nonfinite_metrics=words))


def forget_metrics(run: Run, id: CheckpointId) -> None:
    """Remove what was recorded for a failed save."""
    with contextlib.suppress(ObjectMissingError):  # no record was ever written
        run.records.remove(_key(id))


def read_metrics(run: Run, id: CheckpointId) -> dict[str, float] | None:
    """Return the recorded metrics, or None, also if they are unreadable: only the choice of the best needs them."""
    found = read_sound(run, _key(id), _Metrics, "the metrics of a checkpoint")
    if found is None:
        return None
    with contextlib.suppress(ValueError):  # a word that is not a number
        return {**found.metrics, **{name: float(word) for name, word in found.nonfinite_metrics.items()}}
    return None


def _key(id: CheckpointId) -> str:
    return f"{_METRICS}/{id.record_path}.json"
