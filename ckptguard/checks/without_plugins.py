"""The evidence without the files that a plugin read: nothing that a plugin says can excuse the other files."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ckptguard.checks.evidence import Evidence
from ckptguard.layouts import Checkpoint
from ckptguard.scan.result import Scan
from ckptguard.values.manifest import BY_PLUGIN, Manifest

_LARGEST_MARK = 1024  # bytes of an unknown file that is too small for training state, such as the mark of a whole save
_MaybeManifest = TypeVar("_MaybeManifest", Manifest, Manifest | None)


def without_plugins(evidence: Evidence) -> Evidence:
    """Return the evidence about the other files, also in the manifests that they are compared with."""
    scan, checkpoint = evidence.scan, evidence.checkpoint
    read = {file.entry.key for file in scan.files if file.structure.plugin}
    read |= {f.entry.key for f in scan.files if f.structure.format == "opaque" and f.entry.size <= _LARGEST_MARK}
    files = tuple(file for file in scan.files if file.entry.key not in read)
    stated = tuple(one for one in evidence.sums.stated if one.file not in read)
    return msgspec.structs.replace(
        evidence,
        scan=msgspec.structs.replace(scan, files=files),
        checkpoint=msgspec.structs.replace(
            checkpoint, entries=tuple(entry for entry in checkpoint.entries if entry.key not in read)
        ),
        sealed=_others(evidence.sealed, read),
        reference=_others(evidence.reference, read),
        previous=_others(evidence.previous, read),
        saves=tuple(_others(manifest, read) for manifest in evidence.saves),
        following=_others(evidence.following, read),
        sums=msgspec.structs.replace(evidence.sums, stated=stated),
    )


def files_of_ours(checkpoint: Checkpoint, scan: Scan, sealed: Manifest) -> tuple[Checkpoint, Scan, Manifest]:
    """Return what was read and what was sealed without the files that a plugin read, then or now."""
    read = {f.entry.key for f in scan.files if f.structure.plugin}
    read |= {f.path for f in sealed.files if f.format == BY_PLUGIN}
    named = tuple(f"{checkpoint.inside(key)}: " for key in read)
    counters = tuple(counter for counter in sealed.counters if not counter.source.startswith(named))
    return (
        msgspec.structs.replace(checkpoint, entries=tuple(e for e in checkpoint.entries if e.key not in read)),
        msgspec.structs.replace(scan, files=tuple(f for f in scan.files if f.entry.key not in read)),
        msgspec.structs.replace(_others(sealed, read), counters=counters),
    )


def _others(manifest: _MaybeManifest, read: set[str]) -> _MaybeManifest:
    if manifest is None:
        return None
    files = tuple(file for file in manifest.files if file.format != BY_PLUGIN and file.path not in read)
    return msgspec.structs.replace(manifest, files=files)
