"""Megatron-LM's ``iter_0000500/``: a folder for each model parallel rank, or (torch_dist) sharded files.

The rank folders are ``mp_rank_TT`` (tensor parallel), ``mp_rank_TT_PPP`` with pipeline stages, and have one more number
with expert parallelism. Source: megatron/training/checkpointing.py, ``get_checkpoint_name``.
"""

from __future__ import annotations

import math
import re

from ckptguard.formats.structure import Structure
from ckptguard.layouts.checkpoint import Checkpoint, Folder, Gap, Layout, Structures
from ckptguard.layouts.dcp import dcp_gaps

_FOLDER = re.compile(r"iter_\d{7}|release")
_RANK = re.compile(r"mp_rank_(?P<tensor>\d{2,3})(?:_(?P<pipeline>\d{3}))?(?:_(?P<expert>\d{3}))?")
_MODEL = ("model_optim_rng.pt", "model_rng.pt")
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_MOST = 10_000
_MOST_NAMED = 20


def _accepts(folder: Folder) -> bool:
    if not _FOLDER.fullmatch(folder.name):
        return False
    ranks = any(_RANK.fullmatch(f.partition("/")[0]) for f in folder.below)
    return ranks or ".metadata" in folder.files or any(f.endswith(".distcp") for f in folder.files)


def _gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    names = {checkpoint.inside(key) for key in checkpoint.files}
    ranks = {name.partition("/")[0] for name in names if _RANK.fullmatch(name.partition("/")[0])}
    if not ranks:
        gaps = dcp_gaps(checkpoint, "", structures)
        if "common.pt" not in names:
            gaps.append(Gap("missing; it holds what is not sharded", checkpoint.key("common.pt")))
        return gaps
    gaps = []
    kinds = {name.rpartition("/")[2] for name in names if name.partition("/")[0] in ranks}
    for rank in sorted(ranks):
        if not any(f"{rank}/{model}" in names for model in _MODEL):
            gaps.append(Gap("not there", checkpoint.key(f"{rank}/{_MODEL[0]}")))
        if "distrib_optim.pt" in kinds and f"{rank}/distrib_optim.pt" not in names:
            gaps.append(Gap("not there", checkpoint.key(f"{rank}/distrib_optim.pt")))
    stated = next((s for structure in structures.values() if (s := _stated(structure))), None)
    if stated is None:
        broken = any(s.problems for s in structures.values())
        message = "no file states how many ranks there are, so files of some may be missing"
        return gaps if broken else [*gaps, Gap(message, fatal=False)]
    missing = [rank for rank in _folders(stated) if rank not in ranks]
    what = f"missing; according to the arguments there are {math.prod(stated)} model parallel ranks"
    gaps += [Gap(what, checkpoint.key(f"{rank}/{_MODEL[0]}")) for rank in missing[:_MOST_NAMED]]
    if len(missing) > _MOST_NAMED:
        gaps.append(Gap(f"and {len(missing) - _MOST_NAMED} more ranks are missing"))
    return gaps


def _folders(sizes: tuple[int, int, int]) -> list[str]:
    """Return the rank folders' names. They have no number for a dimension with a single rank."""
    tensor, pipeline, expert = sizes
    stages = [f"_{p:03d}" for p in range(pipeline)] if pipeline > 1 else [""]
    experts = [f"_{e:03d}" for e in range(expert)] if expert > 1 else [""]
    return [f"mp_rank_{t:02d}{p}{e}" for t in range(tensor) for p in stages for e in experts]


def _stated(structure: Structure) -> tuple[int, int, int] | None:
    """Return the (tensor, pipeline, expert) parallel ranks in a file's arguments."""
    stated = {v.name.removeprefix("args."): v.value for v in structure.leaves if v.name.startswith("args.")}
    if _SIZES[0] not in stated:
        return None
    tensor, pipeline, expert = (int(stated.get(name, 1)) for name in _SIZES)
    sane = min(tensor, pipeline, expert) > 0 and tensor * pipeline * expert <= _MOST
    return (tensor, pipeline, expert) if sane else None


LAYOUT = Layout(name="megatron", gaps=_gaps, accepts=_accepts)
