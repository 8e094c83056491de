"""Lightning: one ``.ckpt`` file, or with a sharding strategy a folder of that name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptguard.formats.structure import Structure
from ckptguard.layouts.checkpoint import Checkpoint, Folder, Gap, Layout
from ckptguard.layouts.dcp import dcp_gaps
from ckptguard.layouts.deepspeed import MODEL_STATES, OPTIM_STATES, deepspeed_gaps

_FILE = re.compile(r"(?:.*(?:epoch|step)=\d+.*|last(?:-v\d+)?)\.ckpt")
_META = "meta.pt"


def _accepts(folder: Folder) -> bool:
    if not folder.name.endswith(".ckpt"):
        return False
    sharded = ".metadata" in folder.files or _META in folder.files or any(f.endswith(".distcp") for f in folder.files)
    return sharded or any(f.startswith("checkpoint/") for f in folder.below)


def _gaps(checkpoint: Checkpoint, structures: Mapping[str, Structure]) -> list[Gap]:
    names = {checkpoint.inside(key) for key in checkpoint.files}
    if checkpoint.path in checkpoint.files:
        return []
    deepspeed = [n.rpartition("/")[2] for n in names if n.startswith("checkpoint/")]
    if any(MODEL_STATES.fullmatch(n) or OPTIM_STATES.fullmatch(n) for n in deepspeed):
        return deepspeed_gaps(checkpoint, "checkpoint", structures)
    gaps = dcp_gaps(checkpoint, "", structures)
    if _META not in names:
        gaps.append(Gap(message="not there; it holds what is not sharded", file=checkpoint.key(_META)))
    return gaps


LAYOUT = Layout(
    name="lightning", gaps=_gaps, accepts=_accepts, accepts_file=lambda name, around: _FILE.fullmatch(name) is not None
)
