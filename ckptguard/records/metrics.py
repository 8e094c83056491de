"""Metrics on storage: numbers that were given with a save whose manifest an observer writes later."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from ckptguard.errors import ObjectMissingError, SettingsError
from ckptguard.records.run import Run, create_record, read_sound
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import split_metrics

_FOLDER = "metrics"
MOST_METRICS = 1000
_LONGEST_NAME = 200


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
    """Whether a name can be recorded."""
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
    return f"{_FOLDER}/{id.record_path}.json"
