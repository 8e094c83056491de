"""Our own layout: ``step-000000500/`` with model, optimizer and ``state.json``, sealed by its writer.

Several ranks write torch.distributed.checkpoint's files instead of the two tensor files.
"""

from __future__ import annotations

import re

from ckptguard.formats.table import is_dcp_metadata
from ckptguard.layouts.checkpoint import Checkpoint, Gap, Layout, Structures
from ckptguard.layouts.dcp import SUFFIX as DCP_SUFFIX
from ckptguard.layouts.dcp import dcp_gaps

FOLDER = re.compile(r"step-(\d{9,12})")
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"


def folder_name(step: int) -> str:
    """Return the name of the folder for a step."""
    return f"step-{step:09d}"


def _gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    names = {checkpoint.inside(key) for key in checkpoint.files}
    sharded = any(is_dcp_metadata(name) or name.endswith(DCP_SUFFIX) for name in names)
    needed = (STATE_FILE,) if sharded else (MODEL_FILE, STATE_FILE)
    gaps = [Gap("not there", f"{checkpoint.path}/{name}") for name in needed if name not in names]
    return gaps + (dcp_gaps(checkpoint, "", structures) if sharded else [])


LAYOUT = Layout(
    name="ckptguard",
    gaps=_gaps,
    accepts=lambda folder: FOLDER.fullmatch(folder.name) is not None,
    last_written=lambda path: f"{path}/{STATE_FILE}",
    sealed_by_writer=True,
)
