"""Manifests on storage: one a generation, exclusively created, written last.

Metrics that were given with a save whose manifest an observer writes later wait for it in a record of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from ckptguard.errors import BusyError, ObjectExistsError, ObjectMissingError, RecordsError, SettingsError
from ckptguard.records.run import Run, create_record, read_record, read_sound, record_names
from ckptguard.values.ids import CheckpointId, parse_id, series_folder
from ckptguard.values.manifest import Manifest, decode_manifest, split_metrics
from ckptguard.values.record_text import encode_checked

FOLDER = "manifests"
_METRICS = "metrics"
MOST_METRICS = 1000
_LONGEST_NAME = 200


def manifest_key(id: CheckpointId) -> str:
    """Where the manifest of a generation lies in the records."""
    return f"{FOLDER}/{id.record_path}.json"


def write_manifest(run: Run, manifest: Manifest) -> None:
    """Commit a manifest; BusyError if this generation was sealed by somebody else meanwhile."""
    key = manifest_key(manifest.id)
    try:
        create_record(run, key, encode_checked(manifest))
    except ObjectExistsError as error:
        winner = read_manifest(run, manifest.id)
        if winner is not None and winner.nonce == manifest.nonce:
            return  # ours: the first answer was lost on the way
        raise BusyError(f"{manifest.id} of {manifest.series} was sealed by another process") from error


def read_manifest(run: Run, id: CheckpointId) -> Manifest | None:
    """The manifest of a generation, or None. RecordsError if it is damaged or too new."""
    text = read_record(run, manifest_key(id))
    if text is None:
        return None
    manifest = decode_manifest(text)
    if manifest.id != id:
        raise RecordsError(f"the manifest of {id} of {id.series} is that of another one")
    return manifest


def manifest_names(run: Run, series: str) -> list[str]:
    """The names of a series' manifests, in no promised order."""
    return record_names(run, f"{FOLDER}/{series_folder(series)}")


def sealed_id(series: str, name: str) -> CheckpointId | None:
    """The generation whose manifest has this name; None if it is no manifest's."""
    return parse_id(series, name.removesuffix(".json")) if name.endswith(".json") else None


def sealed_generations(run: Run, series: str) -> list[CheckpointId]:
    """Every generation of a series that has a manifest, in no promised order."""
    ids = (sealed_id(series, name) for name in manifest_names(run, series))
    return [id for id in ids if id is not None]


class _Metrics(msgspec.Struct, frozen=True, kw_only=True):
    format: int = 1
    metrics: dict[str, float] = {}
    nonfinite_metrics: dict[str, str] = {}


def checked_metrics(given: Mapping[Any, Any]) -> dict[str, float]:
    """Named numbers (or what has one, such as a tensor of one element). SettingsError says what is none."""
    if len(given) > MOST_METRICS:
        raise SettingsError(f"at most {MOST_METRICS} metrics can be saved with a checkpoint, not {len(given)}")
    found = {}
    for name, value in given.items():
        if not isinstance(name, str) or not is_metric_name(name):
            raise SettingsError(f"a metric's name is text of 1 to {_LONGEST_NAME} characters, not {name!r:.100}")
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise SettingsError(f"the metric {name!r} is no number, but a {type(value).__name__}") from error
    return found


def is_metric_name(name: str) -> bool:
    """True if a name can be recorded."""
    return 1 <= len(name) <= _LONGEST_NAME and not any("\ud800" <= c <= "\udfff" for c in name)


def write_metrics(run: Run, id: CheckpointId, metrics: Mapping[str, float]) -> None:
    """Record the metrics of a generation that is about to be saved, in place of those of a save that failed."""
    finite, words = split_metrics(metrics)
    forget_metrics(run, id)
    create_record(run, _key(id), _Metrics(metrics=finite, nonfinite_metrics=words))


def forget_metrics(run: Run, id: CheckpointId) -> None:
    """Remove what was recorded for a save that failed."""
    with contextlib.suppress(ObjectMissingError):  # no record was ever written
        run.records.remove(_key(id))


def read_metrics(run: Run, id: CheckpointId) -> dict[str, float] | None:
    """What was recorded, or None: also where it cannot be read, for nothing depends on it but what is the best."""
    found = read_sound(run, _key(id), _Metrics, "the metrics of a checkpoint")
    if found is None:
        return None
    with contextlib.suppress(ValueError):  # a word that is no number
        return {**found.metrics, **{name: float(word) for name, word in found.nonfinite_metrics.items()}}
    return None


def _key(id: CheckpointId) -> str:
    return f"{_METRICS}/{id.record_path}.json"
