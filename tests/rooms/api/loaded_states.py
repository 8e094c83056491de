"""States as they are compared: by their bits, for NaN is not equal to itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch


def same(a: Any, b: Any) -> bool:
    """Whether two states hold the same values of the same types."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and (a.is_quantized or bits(a) == bits(b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Mapping):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or vars(a) == vars(b) if hasattr(a, "__dict__") else a == b)


def bits(tensor: torch.Tensor) -> tuple[torch.Size, bytes]:
    """Shape and bytes, for NaN is not equal to itself."""
    return tensor.shape, bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def by_torch(path: Path) -> Any:
    """What torch itself loads; only of files that the test has written."""
    return torch.load(path, weights_only=False)


def ordered(state: Mapping[str, Any]) -> dict[str, Any]:
    """By name."""
    return {name: state[name] for name in sorted(state)}
