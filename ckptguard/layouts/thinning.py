"""What thinning takes from a checkpoint: the files that only a resume needs. Names and the manifest alone decide.

The rest stays: weights, config, tokenizer, trainer state, metrics, random states. What is left of a Trainer's folder is
what the Trainer itself writes with ``save_only_model``, so the tiny state of the scheduler goes, too: beside weights
alone, a Trainer takes it for a sign of a save that lost its optimizer. In the other layouts only optimizer state goes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import msgspec

from ckptguard.decisions.known_good import series_head_of
from ckptguard.formats import tensor_suffix
from ckptguard.layouts.deepspeed import MODEL_STATES
from ckptguard.layouts.roles import file_role, key_role
from ckptguard.values.ids import escape
from ckptguard.values.manifest import File, Manifest, Tensor

_OPTIMIZER, _OWN = "optimizer", "ckptguard"
_TAKEN = {
    "hf-trainer": (_OPTIMIZER, "scheduler", "scaler"),
    "accelerate": (_OPTIMIZER, "scheduler", "scaler"),
    "deepspeed": (_OPTIMIZER,),
    "lightning": (_OPTIMIZER,),
    "folder": (_OPTIMIZER,),
}
_WEIGHTS = ("model", "ema", "")
_FSDP = re.compile(r"optimizer_\d+/(?:\.metadata|__\d+_\d+\.distcp)")  # Accelerate's sharded optimizer state
# What optimizers name: by the number of a parameter, or by the name of their own tensor after that of a parameter.
_STATE = re.compile(
    r"(?:^|\.)state\.\d+\.(?!(?:weight|bias)$)|(?:^|\.)(?:max_)?(?:exp_avg\w*|momentum_buffer)(?:\.|$)"
    r"|^state\..+\.(?:step|square_avg|grad_avg|acc_delta|sum|state[12]|absmax[12]|qmap[12])$"
)
_IN_SHARDS = "its weights are in the optimizer's shards (DeepSpeed ZeRO-3)"
_IN_ONE_FILE = "its optimizer state is in the same files as its weights"
_LOADED_WHOLE = "a guard loads its own saves whole"


class Split(msgspec.Struct, frozen=True):
    """The files that go and those that stay; without any that go `why` says why, "" if there is nothing to take."""

    goes: tuple[File, ...] = ()
    stays: tuple[File, ...] = ()
    why: str = ""


def split_for_thinning(manifest: Manifest) -> Split:
    """Say which files of a checkpoint thinning takes away. None goes that holds a weight."""
    goes = tuple(file for file in manifest.files if _is_for_resume(manifest, file))
    stays = tuple(file for file in manifest.files if file not in goes)
    if any((m := MODEL_STATES.fullmatch(f.path.rpartition("/")[2])) and m["dp"] for f in manifest.files):
        return Split(why=_IN_SHARDS)
    for file in goes:
        if any(_may_be_weight(tensor) for tensor in file.tensors):
            return Split(why=f"{escape(file.path.rpartition('/')[2])} holds tensors that may be weights")
    if not goes:
        return Split(why=_IN_ONE_FILE if series_head_of(manifest).has_optimizer else "")
    if not series_head_of(msgspec.structs.replace(manifest, files=stays)).has_weights:
        return Split(why="nothing with weights would stay")
    if not any(t.span is not None and f.spans[t.span].length for f in stays for t in f.tensors if t.role in _WEIGHTS):
        return Split(why="no weights with bytes would stay")
    return Split(goes, stays)


def why_never(layout: str) -> str:
    """Return why no checkpoint of a layout is thinned, "" if some are."""
    return "" if layout in _TAKEN else _LOADED_WHOLE if layout == _OWN else _IN_ONE_FILE


def without_resume_state(manifest: Manifest) -> Manifest:
    """Return what would be left of a manifest, to compare something thinned with it."""
    split = split_for_thinning(manifest)
    if manifest.layout == _OWN and not split.goes:  # a guard may have left the optimizer out of a file of all tensors
        files = [f for f in manifest.files if file_role(f.path) != _OPTIMIZER]
        kept = ((f, tuple(t for t in f.tensors if t.role != _OPTIMIZER)) for f in files)
        return msgspec.structs.replace(
            manifest, files=tuple(f if own == f.tensors else msgspec.structs.replace(f, tensors=own) for f, own in kept)
        )
    return msgspec.structs.replace(manifest, files=split.stays) if split.goes else manifest


def roles_taken(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the roles of files that were taken away: optimizer, scheduler, scaler."""
    return tuple(sorted({file_role(path) or _OPTIMIZER for path in paths}))


def _is_for_resume(manifest: Manifest, file: File) -> bool:
    inside = file.path.removeprefix(manifest.path + "/")
    taken = _TAKEN.get(manifest.layout, ())
    if inside == file.path or not taken:  # the checkpoint itself, or a file beside it
        return False
    if _FSDP.fullmatch(inside) and manifest.layout in ("hf-trainer", "accelerate"):
        return True
    role = file_role(inside)
    if role != _OPTIMIZER and "/" in inside:  # a part of a pipeline has a scaler or a scheduler that it is used with
        return False
    return role in taken and tensor_suffix(inside) and not any(t.role in _WEIGHTS for t in file.tensors)


def _may_be_weight(tensor: Tensor) -> bool:
    """True unless its own name is one of an optimizer, or it is one number: the file's name alone does not say it."""
    is_optimizers = key_role(tensor.name.partition(".")[0]) == _OPTIMIZER or _STATE.search(tensor.name) is not None
    return math.prod(tensor.shape) > 1 and not is_optimizers
