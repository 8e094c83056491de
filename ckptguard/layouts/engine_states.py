"""What Trainer and Accelerate keep inside their folders: DeepSpeed's or FSDP's weights, and files of every rank."""

from __future__ import annotations

import re

from ckptguard.formats import tensor_suffix
from ckptguard.layouts.checkpoint import Checkpoint, Gap, Structures
from ckptguard.layouts.dcp import dcp_gaps
from ckptguard.layouts.deepspeed import deepspeed_gaps, is_state_of_rank, latest_gaps, stated_world
from ckptguard.layouts.roles import file_role

_OF_RANK = re.compile(r"(?P<stem>rng_state|random_states)_(?P<rank>\d{1,6})\.(?:pth|pkl)")
_FSDP = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")


def has_engine_states(checkpoint: Checkpoint) -> bool:
    """True if weights are in a DeepSpeed or FSDP folder inside."""
    return bool(_deepspeed_folders(checkpoint)) or any(f.startswith("pytorch_model") for f in _fsdp_folders(checkpoint))


def optimizer_there(checkpoint: Checkpoint) -> bool:
    """True if optimizer state is in its own file, or in a DeepSpeed or FSDP folder inside."""
    own = any(tensor_suffix(key) and file_role(key) == "optimizer" for key in checkpoint.files)
    return own or bool(_deepspeed_folders(checkpoint)) or any(f.startswith("optim") for f in _fsdp_folders(checkpoint))


def engine_gaps(checkpoint: Checkpoint, structures: Structures, *, latest_needed: bool = False) -> list[Gap]:
    """Return what those folders lack. `latest_needed`: DeepSpeed finds its folder only by ``latest``."""
    gaps: list[Gap] = []
    deepspeed = _deepspeed_folders(checkpoint)
    for folder in deepspeed:
        gaps += deepspeed_gaps(checkpoint, folder, structures)
    if deepspeed or any(checkpoint.inside(key) == "latest" for key in checkpoint.files):
        gaps += latest_gaps(checkpoint, structures, needed=latest_needed)
    for folder in _fsdp_folders(checkpoint):
        gaps += dcp_gaps(checkpoint, folder, structures)
    return gaps


def rank_gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    """Warn about missing RNG states of ranks, which would resume with other random numbers.

    A DeepSpeed file beside them states their number. Otherwise the highest existing rank gives it.
    """
    ranks: dict[str, set[int]] = {}
    for key in checkpoint.files:
        match = _OF_RANK.fullmatch(checkpoint.inside(key))
        if match:
            ranks.setdefault(match["stem"], set()).add(int(match["rank"]))
    worlds = filter(None, map(stated_world, structures.values()))
    stated = max((data * model for data, model in worlds), default=0)
    totals = {stem: max(stated, max(present) + 1) for stem, present in sorted(ranks.items())}
    return [
        Gap(f"only {len(ranks[stem])} of {total} ranks have their {stem}", fatal=False)
        for stem, total in totals.items()
        if len(ranks[stem]) < total
    ]


def _deepspeed_folders(checkpoint: Checkpoint) -> list[str]:
    places = (checkpoint.inside(key).rpartition("/") for key in checkpoint.files)
    return sorted({folder for folder, _, name in places if folder and is_state_of_rank(name)})


def _fsdp_folders(checkpoint: Checkpoint) -> list[str]:
    folders = {checkpoint.inside(key).partition("/")[0] for key in checkpoint.files if "/" in checkpoint.inside(key)}
    return sorted(f for f in folders if _FSDP.fullmatch(f))
