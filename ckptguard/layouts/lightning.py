"""Lightning: one ``.ckpt`` file, or with a sharding strategy a folder of that name."""

from __future__ import annotations

import re

from ckptguard.layouts.checkpoint import Checkpoint, Folder, Gap, Layout, Structures
from ckptguard.layouts.dcp import dcp_gaps
from ckptguard.layouts.deepspeed import deepspeed_gaps, is_state_of_rank

_FILE = re.compile(r"(?:.*(?:epoch|step)=\d+.*|last(?:-v\d+)?)\.ckpt")
_META = "meta.pt"


def _accepts(folder: Folder) -> bool:
    if not folder.name.endswith(".ckpt"):
        return False
    sharded = ".metadata" in folder.files or _META in folder.files or any(f.endswith(".distcp") for f in folder.files)
    return sharded or any(f.startswith("checkpoint/") for f in folder.below)


def _gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    if checkpoint.path in checkpoint.files:
        return []
    names = {checkpoint.inside(key) for key in checkpoint.files}
    if any(n.startswith("checkpoint/") and is_state_of_rank(n.rpartition("/")[2]) for n in names):
        return deepspeed_gaps(checkpoint, "checkpoint", structures)
    gaps = dcp_gaps(checkpoint, "", structures)
    if _META not in names:
        gaps.append(Gap("missing; it holds what is not sharded", checkpoint.key(_META)))
    return gaps


LAYOUT = Layout(
    name="lightning", gaps=_gaps, accepts=_accepts, accepts_file=lambda name, around: _FILE.fullmatch(name) is not None
)
