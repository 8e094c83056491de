"""Completeness of Hugging Face style weights: shards with their index, adapters, and torch's sharded form of both.

In that form (``shard-00002-model-00001-of-00003.safetensors``) each rank writes its pieces under the tensors' own
names, in as many files as the model has. Nothing says how many ranks there were. The file's header says where a piece
belongs in its tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptguard.formats.dcp.chunks import Box, flaw_in_cover, offsets_in
from ckptguard.formats.structure import Structure
from ckptguard.layouts.checkpoint import Checkpoint, Gap, Structures

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})(?P<suffix>\.safetensors|\.bin)")
_OF_RANK = re.compile(r"shard-\d{1,9}-model-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
# What transformers and diffusers look for by an index, and read only with it.
_READ_BY_INDEX = {
    ("model", ".safetensors"),
    ("pytorch_model", ".bin"),
    ("diffusion_pytorch_model", ".safetensors"),
    ("diffusion_pytorch_model", ".bin"),
}
_MOST_NAMED = 20


def shard_gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    """Report missing shards and indexes, and tensors that an index promises but its shard does not hold."""
    names = {checkpoint.inside(key) for key in checkpoint.files}
    indexes = {key: s.weight_map for key, s in structures.items() if s.weight_map is not None}
    listed = {
        f"{checkpoint.inside(key).rpartition('/')[0]}/{shard}".lstrip("/")
        for key, weight_map in indexes.items()
        for shard in set(weight_map.values())
    }
    gaps = [*_numbered_gaps(names, listed), *dcp_shard_gaps(checkpoint, structures)]
    for key, weight_map in indexes.items():
        gaps += _index_gaps(checkpoint, key, weight_map, structures)
    return gaps


def _numbered_gaps(names: set[str], listed: set[str]) -> list[Gap]:
    """Report shards that are missing by the others' numbers and that no index names, and a missing index.

    The index may have its own name (torchtune's ``ft-model-00001-of-00002.safetensors``). It is missing only if the
    readers of these names need it: a single shard needs none, and torchtune reads its files by their numbers.
    """
    families: dict[tuple[str, int, str], set[int]] = {}
    for name in names:
        match = _SHARD.fullmatch(name)
        if match and not _OF_RANK.fullmatch(name.rpartition("/")[2]):
            family = (match["stem"], int(match["total"]), match["suffix"])
            families.setdefault(family, set()).add(int(match["number"]))
    families_listed: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, listed)):
        families_listed.setdefault((match["stem"], match["suffix"]), set()).add(int(match["number"]))
    gaps = []
    for (stem, total, suffix), numbers in sorted(families.items()):
        if len(numbers | families_listed.get((stem, suffix), set())) < total:
            have = sorted(numbers)
            gaps.append(Gap(f"only {len(numbers)} of {total} shards of {stem}{suffix} are there: {have[:_MOST_NAMED]}"))
        needs_index = total > 1 and (stem.rpartition("/")[2], suffix) in _READ_BY_INDEX
        if needs_index and f"{stem}{suffix}.index.json" not in names and (stem, suffix) not in families_listed:
            gaps.append(Gap("the shards have no index", f"{stem}{suffix}.index.json"))
    return gaps


def _index_gaps(
    checkpoint: Checkpoint, index_key: str, weight_map: Mapping[str, str], structures: Structures
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
            gaps.append(Gap(f"{index} does not list this shard", key))
    for shard, tensors in sorted(promised.items()):
        key = f"{folder}/{shard}" if folder else shard
        if key not in checkpoint.files:
            gaps.append(Gap(f"{index} lists this shard, but it is missing", key))
        elif key in structures:
            held = {t.name for t in structures[key].tensors}
            absent, extra = sorted(tensors - held), sorted(held - tensors)
            if absent:
                what = f"{index} lists {len(absent)} tensors for this file that it does not hold, first: {absent[0]}"
                gaps.append(Gap(what, key))
            if extra:
                what = f"it holds {len(extra)} tensors that {index} does not list for it, first: {extra[0]}"
                gaps.append(Gap(what, key))
    return gaps


def adapter_gaps(checkpoint: Checkpoint) -> list[Gap]:
    """Report adapters in the checkpoint, or in its folders, without a configuration beside them."""
    keys = set(checkpoint.files)
    folders = {key.rpartition("/")[0] for key in keys if key.rpartition("/")[2] in _ADAPTERS}
    wanted = sorted(f"{folder}/adapter_config.json".lstrip("/") for folder in folders)
    return [Gap("missing; PEFT writes it last", key) for key in wanted if key not in keys]


def dcp_shard_gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    """Report tensors whose pieces do not form the whole, by folder.

    The whole size comes from the consolidated model in the folder above, else from the pieces. In the second case
    missing last ranks cannot be seen.
    """
    folders: dict[str, list[str]] = {}
    for key in checkpoint.files:
        folder, _, name = key.rpartition("/")
        if _OF_RANK.fullmatch(name):
            folders.setdefault(folder, []).append(key)
    gaps: list[Gap] = []
    for folder, keys in sorted(folders.items()):
        inside = checkpoint.inside(keys[0]).rpartition("/")[0]
        where = f" in {inside}" if inside else ""
        gaps += _missing_numbers(where, keys)
        shards = [structures[key] for key in keys if key in structures]
        if len(shards) == len(keys) and not any(s.problems for s in shards):
            gaps += _incomplete(where, shards, _consolidated(folder, structures))
    return gaps


def _missing_numbers(where: str, keys: list[str]) -> list[Gap]:
    """Report model files without a part of any rank. Their tensors may be tied to others', so it is not fatal."""
    matches = [match for key in keys if (match := _OF_RANK.fullmatch(key.rpartition("/")[2]))]
    there = {int(m["number"]) for m in matches}
    total = max(int(m["total"]) for m in matches)
    if len(there) >= total:
        return []
    message = f"there are parts of only {len(there)} of {total} model files{where}: {sorted(there)[:_MOST_NAMED]}"
    return [Gap(message, fatal=False)]


def _consolidated(folder: str, structures: Structures) -> dict[str, tuple[int, ...]]:
    """Return full shapes from whole tensors in the folder above, if they are there."""
    if folder.rpartition("/")[2] != "sharded":
        return {}
    above = folder.rpartition("/")[0]
    return {
        tensor.name: tensor.shape
        for key, structure in structures.items()
        if key.rpartition("/")[0] == above and structure.format == "safetensors" and not structure.problems
        for tensor in structure.tensors
    }


def _incomplete(where: str, shards: list[Structure], whole: Mapping[str, tuple[int, ...]]) -> list[Gap]:
    pieces: dict[str, list[Box]] = {}
    for shard in shards:
        offsets = offsets_in(shard)
        for tensor in shard.tensors:
            at = offsets.get(tensor.name)
            if at is None or len(at) != len(tensor.shape):
                return [Gap(f"the file does not state where {tensor.name}{where} belongs in its tensor")]
            pieces.setdefault(tensor.name, []).append((at, tensor.shape))
    flaws = []
    for name, boxes in sorted(pieces.items()):
        if len({len(at) for at, _ in boxes}) > 1:
            flaws.append(f"{name}: its pieces have different numbers of dimensions")
            continue
        ends = [[start + size for start, size in zip(*box, strict=True)] for box in boxes]
        reach = tuple(max(along) for along in zip(*ends, strict=True))
        flaw = flaw_in_cover(whole.get(name, reach), boxes)
        if flaw:
            flaws.append(f"{name}: {flaw}")
    flaws += [f"{name}: there is no piece of it" for name in sorted(set(whole) - set(pieces))]
    return [Gap(f"{len(flaws)} tensors are not whole{where}, first: {flaws[0]}")] if flaws else []
