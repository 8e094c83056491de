"""Seal: write the manifest. It is the commit; there is no other mark of a finished checkpoint."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from ckptguard.checks import Evidence
from ckptguard.manifest import File, Manifest
from ckptguard.names import series_of
from ckptguard.operations.examine import manifest_files
from ckptguard.operations.history import load_history
from ckptguard.records.clock import utc_now
from ckptguard.records.manifests import write_manifest
from ckptguard.records.run import Run
from ckptguard.version import __version__


def seal_observed(run: Run, evidence: Evidence, generation: int) -> Manifest:
    """Seal a checkpoint from what was read back from storage. BusyError if another process sealed it first."""
    checkpoint = evidence.checkpoint
    manifest = Manifest(
        series=checkpoint.series,
        path=checkpoint.path,
        layout=checkpoint.layout,
        step=checkpoint.step,
        generation=generation,
        digest_origin="observer",
        sealed_at=utc_now(),
        version=__version__,
        nonce=uuid.uuid4().hex,
        files=manifest_files(evidence),
    )
    write_manifest(run, manifest)
    return manifest


def seal_written(
    run: Run,
    *,
    path: str,
    layout: str,
    step: int,
    files: tuple[File, ...],
    metrics: Mapping[str, float] | None = None,
) -> Manifest:
    """Seal a checkpoint that our own writer hashed from memory while saving. It still has no verdict.

    BusyError if another writer sealed the same generation of this step.
    """
    series = series_of(path)
    manifest = Manifest(
        series=series,
        path=path,
        layout=layout,
        step=step,
        generation=load_history(run).next_generation(series, step),
        digest_origin="writer",
        sealed_at=utc_now(),
        version=__version__,
        nonce=uuid.uuid4().hex,
        files=files,
        metrics=dict(metrics or {}),
    )
    write_manifest(run, manifest)
    return manifest
