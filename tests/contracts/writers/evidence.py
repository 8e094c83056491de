"""What a writer knows of its own state, written beside the run: the truth that a load is compared with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def fingerprint(state: Any) -> dict[str, str]:
    """SHA-256 of every tensor of a nested state, by its path; other leaves by their text."""
    return dict(_leaves(state, ""))


def record(run: Path, step: int, **states: Any) -> None:
    """Keep the fingerprints of what is about to be saved for a step, beside the run, never in it."""
    place = truth_file(run, step)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps({name: fingerprint(state) for name, state in states.items()}), encoding="utf-8")


def truth_file(run: Path, step: int) -> Path:
    """Where this rank's fingerprints of one step of a run lie."""
    return run.parent / f"{run.name}.truth" / f"{step}.{os.environ.get('RANK', '0')}.json"


def compare(run: Path, step: int, **states: Any) -> list[str]:
    """The paths at which loaded states differ from those that were saved; empty means bit for bit equal."""
    truth = json.loads(truth_file(run, step).read_text(encoding="utf-8"))
    if set(states) != set(truth):
        return [f"compared {sorted(states)}, recorded {sorted(truth)}"]
    return _differing(truth, states)


def compare_weights(run: Path, step: int, weights: Any) -> list[str]:
    """The same of the weights alone."""
    truth = json.loads(truth_file(run, step).read_text(encoding="utf-8"))
    return _differing({"model": truth["model"]}, {"model": weights})


def _differing(truth: dict[str, dict[str, str]], states: dict[str, Any]) -> list[str]:
    found = {name: fingerprint(state) for name, state in states.items()}
    return [
        f"{name}:{key}"
        for name in sorted(truth)
        for key in sorted(set(truth[name]) | set(found[name]))
        if truth[name].get(key) != found[name].get(key)
    ]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        whole = local.detach().cpu().contiguous().reshape(-1)
        content = whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        text = f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
        yield path, text
    elif isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}/{number}")
    elif type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__"):  # which says where it is, not what
        yield from _leaves(vars(value), f"{path}/{type(value).__name__}")
    else:
        yield path, repr(value)
