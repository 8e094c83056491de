"""Unchanged: do a checkpoint's files still look as they did when they were sealed?"""

from __future__ import annotations

from ckptguard.layouts import Checkpoint
from ckptguard.manifest import Manifest
from ckptguard.operations.classify_change import is_new


def looks_unchanged(checkpoint: Checkpoint, manifest: Manifest) -> bool:
    """Whether all sealed files are there with the sizes, times and inodes of the manifest; others may be beside them.
    It says nothing of bytes that rot under equal times: those are found by verifying."""
    entries = {e.key: e for e in checkpoint.entries}
    there = all(f.path in entries and f.size == entries[f.path].size for f in manifest.files)
    return there and not any(is_new(f, entries[f.path]) for f in manifest.files)
