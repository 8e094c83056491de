"""How far apart the elements of two tensors are."""

from __future__ import annotations

import msgspec


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How the elements of tensor `b` differ from those of tensor `a`, of the same shape.

    `differing` counts elements of other bits (of other values, where the types differ). Elements that are not finite
    on either side count in `nan_*`, `inf_*` and `became_nonfinite` alone: distances are those of the others.
    `relative_l2` is the norm of the change over that of `a` (infinite if `a` is zero), `largest_change` the largest
    absolute change and `largest_index` where; all None for integers, and where no element is finite on both sides.
    Indices are those of the tensor.
    """

    count: int
    differing: int
    relative_l2: float | None = None
    largest_change: float | None = None
    largest_index: tuple[int, ...] | None = None
    nan_a: int = 0
    inf_a: int = 0
    nan_b: int = 0
    inf_b: int = 0
    became_nonfinite: int = 0
    first_nonfinite: tuple[int, ...] | None = None
