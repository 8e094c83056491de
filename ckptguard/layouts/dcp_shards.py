"""The safetensors flavour of torch.distributed.checkpoint: ``shard-00002-model-00001-of-00003.safetensors``.

Each rank writes its pieces of the tensors under the tensors' own names, in as many files as the model has. Nothing
says how many ranks there were; where a piece lies in its tensor stands in the file's header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptguard.formats.dcp.chunks import Box, flaw_in_cover, offsets_in
from ckptguard.formats.structure import Structure
from ckptguard.layouts.checkpoint import Checkpoint, Gap

_NAME = re.compile(r"shard-(?P<rank>\d{1,9})-model-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors")
_MOST_NAMED = 20


def is_dcp_shard(name: str) -> bool:
    """Whether a file, by its name, holds one rank's pieces."""
    return _NAME.fullmatch(name.rpartition("/")[2]) is not None


def dcp_shard_gaps(checkpoint: Checkpoint, structures: Mapping[str, Structure]) -> list[Gap]:
    """Tensors whose pieces do not make up the whole, as far as it can be known, by folder.

    The whole is as large as its pieces reach, or as the folder above says that holds the consolidated model: without
    that, nobody can tell that the last ranks are missing.
    """
    folders: dict[str, list[str]] = {}
    for key in checkpoint.files:
        if is_dcp_shard(key):
            folders.setdefault(key.rpartition("/")[0], []).append(key)
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
    """A model file that no rank has a part of may be one whose tensors are tied to others': not fatal."""
    matches = [match for key in keys if (match := _NAME.fullmatch(key.rpartition("/")[2]))]
    there = {int(m["number"]) for m in matches}
    total = max(int(m["total"]) for m in matches)
    if len(there) >= total:
        return []
    message = f"there are parts of only {len(there)} of {total} model files{where}: {sorted(there)[:_MOST_NAMED]}"
    return [Gap(message=message, fatal=False)]


def _consolidated(folder: str, structures: Mapping[str, Structure]) -> dict[str, tuple[int, ...]]:
    """Full shapes, where whole tensors lie in the folder above."""
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
                return [Gap(message=f"where {tensor.name}{where} lies in its tensor is not stated")]
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
    if not flaws:
        return []
    return [Gap(message=f"{len(flaws)} tensors are not whole{where}, first: {flaws[0]}")]
