"""Our own layout: ``step-000000500/`` with model, optimizer and ``state.json``, sealed by its writer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptguard.formats.structure import Structure
from ckptguard.layouts.checkpoint import Checkpoint, Gap, Layout

FOLDER = re.compile(r"step-(\d{9,12})")
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"


def folder_name(step: int) -> str:
    """The name of the folder for a step."""
    return f"step-{step:09d}"


def _gaps(checkpoint: Checkpoint, structures: Mapping[str, Structure]) -> list[Gap]:
    names = {checkpoint.inside(key) for key in checkpoint.files}
    return [
        Gap(message="not there", file=f"{checkpoint.path}/{name}")
        for name in (MODEL_FILE, STATE_FILE)
        if name not in names
    ]


LAYOUT = Layout(
    name="ckptguard",
    gaps=_gaps,
    accepts=lambda folder: FOLDER.fullmatch(folder.name) is not None,
    last_written=lambda path: f"{path}/{STATE_FILE}",
    sealed_by_writer=True,
)
