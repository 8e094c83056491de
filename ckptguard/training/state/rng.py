"""The random number generators that training uses: Python, NumPy (if imported), torch on CPU and CUDA."""

from __future__ import annotations

import random
import sys
from typing import Any


def capture_rng() -> dict[str, Any]:
    """Return the states as plain values, which `restore_rng` restores exactly."""
    import torch

    state: dict[str, Any] = {"python": random.getstate(), "torch": generator_bytes(torch.get_rng_state())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [generator_bytes(s) for s in torch.cuda.get_rng_state_all()]
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Restore what was captured. Generators that were not in use then stay as they are."""
    import torch

    random.setstate(state["python"])
    torch.set_rng_state(generator_tensor(state["torch"]))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator_tensor(text), device)


def same_rng(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """True if nothing was drawn on the CPU between two captures."""
    pairs = [(first[name], second[name]) for name in ("python", "torch")]
    pairs += zip(first.get("numpy", ()), second.get("numpy", ()), strict=False)
    return all(bool((a == b).all() if hasattr(a, "all") else a == b) for a, b in pairs)


def generator_bytes(state: Any) -> bytes:
    """Return a torch generator's state (a byte tensor) as bytes."""
    return bytes(state.tolist())


def generator_tensor(text: bytes) -> Any:
    """Invert `generator_bytes`."""
    import torch

    return torch.tensor(list(text), dtype=torch.uint8)
