"""Manifests on storage: one a generation, exclusively created, written last."""

from __future__ import annotations

from ckptguard.errors import BusyError, ObjectExistsError, RecordsError
from ckptguard.records.run import Run, create_record, read_record, record_names
from ckptguard.values.ids import CheckpointId, parse_id, series_folder
from ckptguard.values.manifest import Manifest, decode_manifest
from ckptguard.values.record_text import encode_checked

FOLDER = "manifests"


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
