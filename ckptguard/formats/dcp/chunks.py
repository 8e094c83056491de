"""Pieces of tensors: their names, and whether they form the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckptguard.formats.strict_json import JsonProblem, parse_object
from ckptguard.formats.structure import ChunkPlace, Structure

_OFFSETS = "DCP_SHARDING_INFO"
_COMPARISONS = 16  # for each piece: a grid needs about as many as it has rows

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def part_name(name: str, offsets: Sequence[int], shape: Sequence[int]) -> str:
    """Return the name of a piece: ``model.w[0:4, 8:16]``."""
    return f"{name}[{', '.join(f'{at}:{at + size}' for at, size in zip(offsets, shape, strict=True))}]"


def chunk_name(chunk: ChunkPlace) -> str:
    """Return the name of a stored range: that of the tensor (or object) if it is all of it."""
    return chunk.name if chunk.whole else part_name(chunk.name, chunk.offsets, chunk.shape)


def flaw_in_cover(size: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Return why pieces do not form a tensor of this size, each element once; None if they do.

    The number of comparisons is limited, so overlaps in a large grid may be missed.
    """
    for offsets, shape in boxes:
        if len(offsets) != len(size) or len(shape) != len(size):
            return "a piece of it has another number of dimensions"
        if any(at + extent > whole for at, extent, whole in zip(offsets, shape, size, strict=True)):
            return f"its piece {part_name('', offsets, shape)} reaches beyond {list(size)}"
    filled = [box for box in boxes if 0 not in box[1]]
    volume, stored = math.prod(size), sum(math.prod(shape) for _, shape in filled)
    if volume != stored:
        return f"its pieces hold {stored} of {volume} elements"
    return _overlap(size, filled) if len(filled) > 1 else None


def _overlap(size: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Find two pieces that share elements. Sorted along the dimension with most cuts, only near ones can."""
    along = max(range(len(size)), key=lambda d: len({offsets[d] for offsets, _ in boxes}))
    ordered = sorted(boxes, key=lambda box: box[0][along])
    room = _COMPARISONS * len(boxes) + 256
    for index, (offsets, shape) in enumerate(ordered):
        end = offsets[along] + shape[along]
        for other in range(index + 1, len(ordered)):
            beside, extent = ordered[other]
            room -= 1
            if beside[along] >= end or not room:
                break
            if all(a < b + m and b < a + n for a, n, b, m in zip(offsets, shape, beside, extent, strict=True)):
                return f"its pieces {part_name('', offsets, shape)} and {part_name('', beside, extent)} overlap"
        if not room:
            break
    return None


def offsets_in(structure: Structure) -> dict[str, tuple[int, ...]]:
    """Return where the tensors of a safetensors file belong in their whole tensors, from its header; {} if it is
    unclear."""
    try:
        stated = parse_object(structure.metadata.get(_OFFSETS, "{}").encode("utf-8", "replace"))
    except JsonProblem:
        return {}
    found = {}
    for name, described in stated.items():
        offsets = described.get("saved_offsets") if isinstance(described, dict) else None
        if isinstance(offsets, list) and all(type(n) is int and 0 <= n < 2**63 for n in offsets):
            found[name] = tuple(offsets)
    return found
