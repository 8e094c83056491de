"""Completeness of Hugging Face style weights: an index that lists every shard, and every shard there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptguard.formats.structure import Structure
from ckptguard.layouts.checkpoint import Checkpoint, Gap
from ckptguard.layouts.dcp_shards import dcp_shard_gaps, is_dcp_shard

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})(?P<suffix>\.safetensors|\.bin)")
_MOST_NAMED = 20


def shard_gaps(checkpoint: Checkpoint, structures: Mapping[str, Structure]) -> list[Gap]:
    """Shards or indexes that are missing, and tensors that an index promises but its shard does not hold."""
    names = {checkpoint.inside(key) for key in checkpoint.files}
    listed = {
        f"{checkpoint.inside(key).rpartition('/')[0]}/{shard}".lstrip("/")
        for key, structure in structures.items()
        for shard in set((structure.weight_map or {}).values())
    }
    gaps = [*_numbered_gaps(names, listed), *dcp_shard_gaps(checkpoint, structures)]
    for key, structure in structures.items():
        if structure.weight_map is not None:
            gaps += _index_gaps(checkpoint, key, structure.weight_map, structures)
    return gaps


def _numbered_gaps(names: set[str], listed: set[str]) -> list[Gap]:
    """Shards that are not there by the numbers in the others' names, and families that no index lists, as that may
    have a name of its own (torchtune's ``ft-model-00001-of-00002.safetensors``)."""
    families: dict[tuple[str, int, str], set[int]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match and not is_dcp_shard(name):
            family = (match["stem"], int(match["total"]), match["suffix"])
            families.setdefault(family, set()).add(int(match["number"]))
    gaps = []
    for (stem, total, suffix), numbers in sorted(families.items()):
        if len(numbers) < total:
            have = sorted(numbers)
            gaps.append(
                Gap(message=f"only {len(numbers)} of {total} shards of {stem}{suffix} are there: {have[:_MOST_NAMED]}")
            )
        family_listed = any(
            (m := _SHARD.fullmatch(name)) and (m["stem"], m["suffix"]) == (stem, suffix) for name in listed
        )
        if f"{stem}{suffix}.index.json" not in names and not family_listed:
            gaps.append(Gap(message="the shards have no index", file=f"{stem}{suffix}.index.json"))
    return gaps


def _index_gaps(
    checkpoint: Checkpoint, index_key: str, weight_map: Mapping[str, str], structures: Mapping[str, Structure]
) -> list[Gap]:
    folder = index_key.rpartition("/")[0]
    index = checkpoint.inside(index_key)
    promised: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        promised.setdefault(shard, set()).add(tensor)
    gaps = []
    stem, _, suffix = index.removesuffix(".index.json").rpartition(".")
    for key in checkpoint.files:
        match = _SHARD.fullmatch(checkpoint.inside(key))
        family = match is not None and (match["stem"], match["suffix"]) == (stem, "." + suffix)
        if family and key.rpartition("/")[2] not in promised:
            gaps.append(Gap(message=f"{index} does not list this shard", file=key))
    for shard, tensors in sorted(promised.items()):
        key = f"{folder}/{shard}" if folder else shard
        if key not in checkpoint.files:
            gaps.append(Gap(message=f"{index} lists this shard, but it is not there", file=key))
        elif key in structures:
            held = {t.name for t in structures[key].tensors}
            absent, extra = sorted(tensors - held), sorted(held - tensors)
            if absent:
                gaps.append(
                    Gap(
                        message=f"{index} puts {len(absent)} tensors here that it does not hold, first: {absent[0]}",
                        file=key,
                    )
                )
            if extra:
                gaps.append(
                    Gap(
                        message=f"{len(extra)} tensors are here that {index} does not put here, first: {extra[0]}",
                        file=key,
                    )
                )
    return gaps
