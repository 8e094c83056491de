"""torch.distributed.checkpoint's folder: ``.distcp`` files, and ``.metadata``, which is written last.

Without collectives each rank writes its own ``__0.metadata`` for its own files.
"""

from __future__ import annotations

import re

from ckptguard.formats.table import is_dcp_metadata
from ckptguard.layouts.checkpoint import Checkpoint, Folder, Gap, Layout, Structures

_METADATA = ".metadata"
SUFFIX = ".distcp"
_OF_RANK = re.compile(r"__(\d{1,9})(?:_\d+\.distcp|\.metadata)")


def dcp_gaps(checkpoint: Checkpoint, folder: str, structures: Structures) -> list[Gap]:
    """Return what a folder inside the checkpoint lacks ("": the checkpoint itself).

    Files that its ``.metadata`` does not name are gaps, too: one of them is from another save. Empty files are normal,
    for ranks or threads with nothing to write.
    """
    prefix = folder + "/" if folder else ""
    below = ((checkpoint.inside(e.key), e.size) for e in checkpoint.entries)
    inside = {name[len(prefix) :]: size for name, size in below if name.startswith(prefix)}
    sizes = {name: size for name, size in inside.items() if "/" not in name}
    described = [name for name in sizes if is_dcp_metadata(name)]
    stored = sorted(name for name in sizes if name.endswith(SUFFIX))
    named: dict[str, int] = {}  # where the last range of each file ends
    known = True  # whether every metadata file could be read
    for name in described:
        structure = structures.get(checkpoint.key(prefix + name))
        known = known and structure is not None and not structure.problems
        for file, chunks in structure.chunks.items() if structure is not None else ():
            named[file] = max(named.get(file, 0), chunks[-1].offset + chunks[-1].length if chunks else 0)

    def gap(name: str, message: str) -> Gap:
        return Gap(message, checkpoint.key(prefix + name))

    gaps = [gap(name, "missing; it is written last") for name in _metadata_to_expect(described, stored)]
    for name, length in sorted(named.items()):
        if name not in sizes:
            gaps.append(gap(name, f"{_METADATA} names this file, but it is missing"))
        elif sizes[name] < length:
            gaps.append(gap(name, f"it has {sizes[name]} bytes, but {_METADATA} states ranges up to byte {length}"))
    if described and known:
        strange = [name for name in stored if name not in named and sizes[name]]
        gaps += [
            gap(name, f"{_METADATA} does not name this file: one of them comes from another save") for name in strange
        ]
    return gaps


def _metadata_to_expect(described: list[str], stored: list[str]) -> list[str]:
    """Return the names of missing metadata: the one for all ranks, or those of ranks that left other files."""
    if _METADATA in described:
        return []
    if not described:
        return [_METADATA]
    ranks = {int(match[1]) for name in (*described, *stored) if (match := _OF_RANK.fullmatch(name))}
    return [name for rank in sorted(ranks) if (name := f"__{rank}{_METADATA}") not in described]


def _accepts(folder: Folder) -> bool:
    return any(is_dcp_metadata(f) or f.endswith(SUFFIX) for f in folder.files)


LAYOUT = Layout(
    name="dcp",
    gaps=lambda checkpoint, structures: dcp_gaps(checkpoint, "", structures),
    accepts=_accepts,
    last_written=lambda path: f"{path}/{_METADATA}",
    last_is_the_end=True,
)
