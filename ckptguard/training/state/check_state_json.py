"""Is what was saved beside model and optimizer what a guard saves there? That its bytes are right does not say so."""

from __future__ import annotations

import math
import random
from typing import Any

from ckptguard.training.state.rng import generator_tensor


def wrong_with(extra: Any) -> str | None:
    """Why it could not be put back; None if it can. What an older version did not save is not missed."""
    if not isinstance(extra, dict):
        return f"it is a {type(extra).__name__}"
    for name, ask in (("rng", _wrong_rng), ("guard", _wrong_guard), ("data", _wrong_data)):
        if extra.get(name) is not None:
            why = ask(extra[name])
            if why is not None:
                return f"its {name} {why}"
    return None


def _wrong_rng(state: Any) -> str | None:
    """Tried on generators that nobody uses."""
    import torch

    try:
        random.Random().setstate(state["python"])
        torch.Generator().set_state(generator_tensor(state["torch"]))
        if "numpy" in state:
            import numpy

            numpy.random.RandomState().set_state(state["numpy"])
    except Exception as error:
        return f"is no state of the generators ({type(error).__name__}: {error})"
    cuda = state.get("cuda", [])
    if not isinstance(cuda, list) or not all(isinstance(text, bytes) for text in cuda):
        return "is no state of the generators (cuda)"
    return None


def _wrong_guard(state: Any) -> str | None:
    factor: Any = state.get("lr_factor", 1.0) if isinstance(state, dict) else None
    if type(factor) not in (int, float) or not math.isfinite(factor) or factor <= 0:
        return "holds no factor of the learning rate"
    return None


def _wrong_data(state: Any) -> str | None:
    if not isinstance(state, dict):
        return f"is a {type(state).__name__}"
    counts = (state.get("epoch"), state.get("taken"))
    if not all(type(count) is int and count >= 0 for count in counts) or type(state.get("begun")) is not bool:
        return "is no position"
    skipped = state.get("skipped")
    if not isinstance(skipped, list) or not all(_is_draw(draw) for draw in skipped):
        return "does not say which batches were left out"
    start = state.get("epoch_start")
    start = start if isinstance(start, dict) else {}
    generators = start.get("generators")
    if not isinstance(generators, list) or not all(isinstance(text, bytes) for text in generators):
        return "does not say how its epoch began"
    if "length" not in state:
        return "does not say how long the loader was"
    if state["begun"] and state.get("loader") is None:
        return "does not say how its epoch began" if "rng" not in start else _wrong_rng(start["rng"])
    return None


def _is_draw(draw: Any) -> bool:
    return isinstance(draw, list | tuple) and len(draw) == 2 and all(type(number) is int for number in draw)
