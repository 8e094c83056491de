"""Seal: write the manifest. That is the commit; nothing else marks a finished checkpoint."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from ckptguard.checks import Evidence
from ckptguard.checks.order import counters_of, named_counters
from ckptguard.records.manifests import MOST_METRICS, is_metric_name, read_metrics, write_manifest
from ckptguard.records.run import Run
from ckptguard.records.who_and_when import utc_now
from ckptguard.runs.file_signatures import as_reported
from ckptguard.runs.history import history_of_series
from ckptguard.values.ids import CheckpointId, Step, series_of
from ckptguard.values.manifest import Counter, File, Manifest, Seen, split_metrics
from ckptguard.values.record_formats import MANIFEST
from ckptguard.verification.collect_evidence import manifest_files
from ckptguard.version import __version__

_LOGGED = "log_history.-1."  # of trainer_state.json


def seal_observed(run: Run, evidence: Evidence, id: CheckpointId) -> Manifest:
    """Seal a checkpoint from what was read from storage. Raises BusyError if another process sealed it first.

    Its metrics are those given with the save, else those that a Trainer logged last.
    """
    checkpoint, metrics = evidence.checkpoint, read_metrics(run, id)
    metrics = logged_metrics(evidence) if metrics is None else metrics
    files = manifest_files(evidence)
    inside = counters_of(checkpoint, evidence.scan)
    return _seal(run, id, checkpoint.path, checkpoint.layout, files, metrics, inside, evidence.thinned)


def seal_written(
    run: Run,
    *,
    path: str,
    layout: str,
    step: Step,
    files: tuple[File, ...],
    metrics: Mapping[str, float] | None = None,
    left_out: Sequence[str] = (),
) -> Manifest:
    """Seal a checkpoint that our own writer hashed while saving. It has no verdict yet.

    Files that only a resume needs were `left_out`: it is as if thinning had taken them.

    Raises BusyError if another writer sealed the same generation.
    """
    series = series_of(path)
    id = history_of_series(run, series).next_id(series, step)
    thinned = tuple((file, 0, None, None, None) for file in left_out)
    return _seal(run, id, path, layout, files, metrics or {}, thinned=thinned)


def _seal(
    run: Run,
    id: CheckpointId,
    path: str,
    layout: str,
    files: tuple[File, ...],
    metrics: Mapping[str, float],
    inside: tuple[Counter, ...] | None = None,
    thinned: tuple[Seen, ...] = (),
) -> Manifest:
    finite, words = split_metrics(metrics)
    manifest = Manifest(
        format=MANIFEST.writes,
        **msgspec.structs.asdict(id),
        path=path,
        layout=layout,
        digest_origin="writer" if inside is None else "observer",
        sealed_at=utc_now(),
        version=__version__,
        nonce=uuid.uuid4().hex,
        files=files,
        metrics=finite,
        nonfinite_metrics=words,
        counters=(*(inside or ()), *named_counters(path)),
        thinned=thinned,
    )
    write_manifest(run, manifest)
    return manifest


def as_stored(run: Run, file: File) -> File:
    """Return the file with the storage's report of it at its final path."""
    return as_reported(file, run.storage.stat(file.path))


def logged_metrics(evidence: Evidence) -> dict[str, float]:
    """Return the numbers of the last entry of a Trainer's log: an evaluation, if one came before the save."""
    named = (leaf for leaf in evidence.leaves() if leaf.name.startswith(_LOGGED))
    found = ((leaf.name.removeprefix(_LOGGED), leaf.value) for leaf in named)
    return {name: float(value) for name, value in islice(found, MOST_METRICS) if is_metric_name(name)}
