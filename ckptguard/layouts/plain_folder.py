"""A folder that directly holds tensor files: ``save_pretrained``, a downloaded model, a user's own loop."""

from __future__ import annotations

import re
from collections.abc import Collection

from ckptguard.decisions.known_good import SAVED_LAST, SET_ASIDE
from ckptguard.formats import tensor_suffix
from ckptguard.formats.table import is_dcp_metadata
from ckptguard.layouts.checkpoint import Checkpoint, Folder, Gap, Layout, Structures
from ckptguard.layouts.roles import file_role
from ckptguard.layouts.sharded import adapter_gaps, shard_gaps
from ckptguard.layouts.step_names import counts_by_word, step_from_name

_ALONE = re.compile(  # one of several saves, or a name that only a save has
    rf"(?:(?:(?:checkpoint|ckpt|epoch|model|weights|net)[-_.])?(?:{'|'.join((*SAVED_LAST, *SET_ASIDE))})(?:[-_.=].*)?"
    r"|checkpoint|ckpt|snapshot)\.(?:ckpt|pth?(?:\.tar)?)",
    re.IGNORECASE,
)


def _gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    gaps = [*shard_gaps(checkpoint, structures), *adapter_gaps(checkpoint)]
    if not checkpoint.claimed and not any(holds_state(key) for key in checkpoint.files):
        gaps.append(Gap("there is no file with weights or optimizer state"))
    return gaps


def holds_state(key: str) -> bool:
    """True if a file's name is for weights or optimizer state (not only RNG, scheduler or arguments)."""
    return tensor_suffix(key) and file_role(key) in ("model", "optimizer", "ema", "")


def holds_weights(key: str) -> bool:
    """True if a single file carries weights, by its name: in any folder, under any name without another role
    (``unet/diffusion_pytorch_model.safetensors``, ``mm_projector.bin``)."""
    by_itself = not key.endswith(".distcp") and not is_dcp_metadata(key)  # those are pieces of something
    return by_itself and tensor_suffix(key) and file_role(key) in ("model", "")


def is_loose(file_name: str, around: Collection[str] = (), *, words: bool = True) -> bool:
    """True if a tensor file is a checkpoint of its own: not a shard, with a step or a name like ``last.ckpt``.

    `around` are the names beside it, and `words` are as in `step_from_name`.
    """
    stated = step_from_name(file_name, around, words=words) is not None or bool(_ALONE.fullmatch(file_name))
    return stated and holds_state(file_name)


def _accepts(folder: Folder) -> bool:
    """Accept a folder of files that were saved together; not one where each file is a save (``seed-1/ckpt-500.pt``)."""
    state = [f for f in folder.files if holds_state(f)]
    step = step_from_name(folder.name)
    counted = {step_from_name(f, folder.files) for f in state if counts_by_word(f)}
    if not state or folder.holds_saves or len(counted) > 1:
        return False
    if step is None:
        return not any(is_loose(f, folder.files) for f in state)
    if counts_by_word(folder.name):
        return True
    # "seed-1" may count anything: then its files must not state other steps.
    stated = (
        counted if folder.name.isdigit() else {n for f in state if (n := step_from_name(f, folder.files)) is not None}
    )
    return stated <= {step} and not any(_ALONE.fullmatch(f) for f in state)


LAYOUT = Layout(name="folder", gaps=_gaps, accepts=_accepts)
