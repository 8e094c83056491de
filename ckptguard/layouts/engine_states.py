"""What Trainer and Accelerate keep inside their folders when DeepSpeed or FSDP holds the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptguard.formats import tensor_suffix
from ckptguard.formats.structure import Structure
from ckptguard.layouts.checkpoint import Checkpoint, Gap
from ckptguard.layouts.dcp import dcp_gaps
from ckptguard.layouts.deepspeed import MODEL_STATES, OPTIM_STATES, deepspeed_gaps, latest_gaps
from ckptguard.layouts.roles import file_role

_FSDP = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")


def has_engine_states(checkpoint: Checkpoint) -> bool:
    """Whether weights lie in a DeepSpeed or FSDP folder inside."""
    return bool(_deepspeed_folders(checkpoint)) or any(f.startswith("pytorch_model") for f in _fsdp_folders(checkpoint))


def optimizer_there(checkpoint: Checkpoint) -> bool:
    """Whether optimizer state lies in a file of its own, or in a DeepSpeed or FSDP folder inside."""
    own = any(tensor_suffix(key) and file_role(key) == "optimizer" for key in checkpoint.files)
    return own or bool(_deepspeed_folders(checkpoint)) or any(f.startswith("optim") for f in _fsdp_folders(checkpoint))


def engine_gaps(
    checkpoint: Checkpoint, structures: Mapping[str, Structure], *, latest_needed: bool = False
) -> list[Gap]:
    """What those folders lack. `latest_needed`: DeepSpeed finds its folder by ``latest`` alone."""
    gaps: list[Gap] = []
    deepspeed = _deepspeed_folders(checkpoint)
    for folder in deepspeed:
        gaps += deepspeed_gaps(checkpoint, folder, structures)
    if deepspeed or any(checkpoint.inside(key) == "latest" for key in checkpoint.files):
        gaps += latest_gaps(checkpoint, structures, needed=latest_needed)
    for folder in _fsdp_folders(checkpoint):
        gaps += dcp_gaps(checkpoint, folder, structures)
    return gaps


def _deepspeed_folders(checkpoint: Checkpoint) -> list[str]:
    found = set()
    for key in checkpoint.files:
        folder, _, name = checkpoint.inside(key).rpartition("/")
        if folder and (MODEL_STATES.fullmatch(name) or OPTIM_STATES.fullmatch(name)):
            found.add(folder)
    return sorted(found)


def _fsdp_folders(checkpoint: Checkpoint) -> list[str]:
    folders = {checkpoint.inside(key).partition("/")[0] for key in checkpoint.files if "/" in checkpoint.inside(key)}
    return sorted(f for f in folders if _FSDP.fullmatch(f))
