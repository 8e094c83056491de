"""DeepSpeed's tag folder (``global_step500/``): model states, and with ZeRO the optimizer states of every rank.

Nothing marks its end: ``latest`` beside the folder is written before other ranks finish. The model states say how many
files there should be (``dp_world_size``, ``mp_world_size``).
Source: deepspeed/runtime/engine.py, ``_get_ckpt_name`` and ``_get_zero_ckpt_name``, read at 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ckptguard.formats.structure import Structure
from ckptguard.layouts.checkpoint import Checkpoint, Gap, Layout, Structures

MODEL_STATES = re.compile(
    r"(?:zero_pp_rank_(?P<dp>\d{1,6})_)?mp_rank_(?P<mp>\d{1,6})(?:_\d+)?_model_states\.pt|layer_\d+-model_\d+-model_states\.pt"
)
OPTIM_STATES = re.compile(r"(?P<kind>\w*?)zero_pp_rank_(?P<dp>\d{1,6})_mp_rank_(?P<mp>\d{1,6})_optim_states\.pt")
_EXPERT = re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt|layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt")
_MOST_RANKS = 100_000
_MOST_NAMED = 20


def is_state_of_rank(name: str) -> bool:
    """True if a file's name is that of model or optimizer states."""
    return (MODEL_STATES.fullmatch(name) or OPTIM_STATES.fullmatch(name)) is not None


def stated_world(structure: Structure) -> tuple[int, int] | None:
    """Return (data parallel ranks, model parallel ranks) from model states; None for any other file."""
    stated = {leaf.name: leaf.value for leaf in structure.leaves if leaf.name in ("dp_world_size", "mp_world_size")}
    data, model = stated.get("dp_world_size"), stated.get("mp_world_size", 1)
    if isinstance(data, int) and isinstance(model, int) and 0 < data * model <= _MOST_RANKS and model > 0:
        return data, model
    return None


def deepspeed_gaps(checkpoint: Checkpoint, folder: str, structures: Structures) -> list[Gap]:
    """Return what a tag folder inside the checkpoint lacks ("": the checkpoint itself)."""
    prefix = checkpoint.key(folder) + "/" if folder else checkpoint.key("")
    names = {key[len(prefix) :] for key in checkpoint.files if key.startswith(prefix)}
    models = {name: match for name in names if (match := MODEL_STATES.fullmatch(name))}
    optims = {name: match for name in names if (match := OPTIM_STATES.fullmatch(name))}
    if not models:
        return [Gap(f"there are no model states in {folder}" if folder else "there are no model states")]
    known = [structures[prefix + name] for name in sorted(models) if prefix + name in structures]
    world = _stated_by_first(known)
    if world is None:
        if any(s.problems for s in known) or len(known) < len(models):
            return []  # the file with that number is broken, which has its own finding
        return [Gap("no file states the world size, so files of some ranks may be missing", fatal=False)]
    data, model = world
    expected: list[str] = []
    if any(m["dp"] is not None for m in models.values()):  # ZeRO-3: every rank has model states
        expected += [f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" for mp in range(model) for dp in range(data)]
    elif any(m["mp"] is not None for m in models.values()):
        expected += [f"mp_rank_{mp:02d}_model_states.pt" for mp in range(model)]
    stages = [leaf.value for s in known for leaf in s.leaves if leaf.name == "ds_config.zero_optimization.stage"]
    if (any(stages) or optims) and not any(_EXPERT.fullmatch(name) for name in names):
        kind = next((m["kind"] for m in optims.values()), "")
        expected += [
            f"{kind}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt" for mp in range(model) for dp in range(data)
        ]
    missing = [name for name in expected if name not in names]
    what = f"missing; according to the model states there are {data * model} ranks"
    gaps = [Gap(what, prefix + name) for name in missing[:_MOST_NAMED]]
    if len(missing) > _MOST_NAMED:
        gaps.append(Gap(f"and {len(missing) - _MOST_NAMED} more files of other ranks are missing"))
    left = leftovers(names, known)
    what = f"left from a save by more ranks: according to the model states there are {data * model}"
    gaps += [Gap(what, prefix + name, fatal=False) for name in sorted(left)[:_MOST_NAMED]]
    return gaps + _disagreements(prefix, sorted(set(models) - left), structures)


def leftovers(names: Collection[str], model_states: Sequence[Structure]) -> set[str]:
    """Return the names of files of ranks that the last save did not have, by the first of the `model_states`."""
    world = _stated_by_first(model_states)
    if world is None:
        return set()
    matches = {n: m for n in names if (m := MODEL_STATES.fullmatch(n) or OPTIM_STATES.fullmatch(n)) and m["mp"]}
    return {n for n, m in matches.items() if int(m["dp"] or 0) >= world[0] or int(m["mp"]) >= world[1]}


def _stated_by_first(model_states: Sequence[Structure]) -> tuple[int, int] | None:
    """Return the number of ranks in the first rank's model states. Every save writes these, but others may be old."""
    return next(filter(None, map(stated_world, model_states)), None)


def _disagreements(prefix: str, models: Sequence[str], structures: Structures) -> list[Gap]:
    """Report model states of ranks from another save than the first rank's. A pipeline's layers do not state it."""
    stated = {}
    for name in models:
        structure = structures.get(prefix + name)
        if not name.startswith("layer_") and structure is not None and not structure.problems:
            steps = next((leaf.value for leaf in structure.leaves if leaf.name == "global_steps"), None)
            stated[name] = (steps, stated_world(structure))
    first = next(iter(stated.values()), None)
    return [
        Gap(f"it states global_steps {this[0]}, other ranks {first[0]}: they come from two saves", prefix + n)
        for n, this in stated.items()
        if first is not None and this != first and this[0] is not None
    ][:_MOST_NAMED]


def latest_gaps(checkpoint: Checkpoint, structures: Structures, *, needed: bool) -> list[Gap]:
    """Report if ``latest`` inside the checkpoint is missing or names a missing folder."""
    key = checkpoint.key("latest")
    if key not in checkpoint.files:
        what = "missing; without it DeepSpeed loads nothing and only logs a warning"
        return [Gap(what, key, fatal=needed)]
    if key not in structures:
        return []
    tag = structures[key].metadata.get("points_to")
    if tag is None:
        return [Gap("it names no folder", key, fatal=needed)]
    there = any(checkpoint.inside(file).startswith(tag + "/") for file in checkpoint.files)
    return [] if there else [Gap("it names a folder that is missing", key, fatal=needed)]


def _gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    gaps = deepspeed_gaps(checkpoint, "", structures)
    for key, structure in structures.items():
        stated = next((v.value for v in structure.leaves if v.name == "global_steps"), None)
        tagged = checkpoint.path.rpartition("/")[2] == f"global_step{checkpoint.step}"
        if stated is not None and tagged and stated != checkpoint.step:
            gaps.append(Gap(f"it states global_steps {stated} in this folder", key, fatal=False))
    return gaps


LAYOUT = Layout(name="deepspeed", gaps=_gaps, accepts=lambda folder: any(map(is_state_of_rank, folder.files)))
