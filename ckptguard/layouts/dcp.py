"""torch.distributed.checkpoint's folder: ``.distcp`` files, and the ``.metadata`` that is written last."""

from __future__ import annotations

from collections.abc import Mapping

from ckptguard.formats.structure import Structure
from ckptguard.layouts.checkpoint import Checkpoint, Folder, Gap, Layout

_METADATA = ".metadata"


def dcp_gaps(checkpoint: Checkpoint, folder: str, structures: Mapping[str, Structure]) -> list[Gap]:
    """What a folder inside the checkpoint ("": the checkpoint itself) lacks."""
    key = checkpoint.key(f"{folder}/{_METADATA}" if folder else _METADATA)
    return [] if key in checkpoint.files else [Gap(message="not there; it is written last", file=key)]


def _accepts(folder: Folder) -> bool:
    return _METADATA in folder.files or any(f.endswith(".distcp") for f in folder.files)


LAYOUT = Layout(
    name="dcp",
    gaps=lambda checkpoint, structures: dcp_gaps(checkpoint, "", structures),
    accepts=_accepts,
    last_written=lambda path: f"{path}/{_METADATA}",
)
