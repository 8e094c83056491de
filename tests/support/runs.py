"""Small real checkpoints, written by the real writers."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch

from ckptguard.values.settings import Settings

QUICK = Settings(settle=0.0, scan_interval=1.0)
"""Settings for tests: files written a moment ago count as quiet."""


def state_dict(seed: int, *, layers: int = 4, width: int = 48) -> dict[str, torch.Tensor]:
    """A model-like state: matrices in three float dtypes, vectors, an integer counter."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    state: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        for name, dtype in zip(("query", "key", "value"), dtypes, strict=True):
            weight = torch.randn(width, width, generator=generator)
            state[f"layers.{layer}.{name}.weight"] = weight.to(dtype)
        state[f"layers.{layer}.norm.bias"] = torch.randn(width, generator=generator)
    state["embed.weight"] = torch.randn(width * 2, width, generator=generator)
    state["steps_seen"] = torch.tensor([seed], dtype=torch.int64)
    return state


def write_safetensors(run: Path, step: int, seed: int) -> str:
    """A folder with one safetensors file and its configuration."""
    folder = run / f"model-{step}"
    folder.mkdir(parents=True)
    save_file(state_dict(seed), folder / "model.safetensors")
    (folder / "config.json").write_text('{"hidden_size": 48}')
    return folder.name


def write_sharded(run: Path, step: int, seed: int) -> str:
    """Hugging Face's shards with an index."""
    folder = run / f"sharded-{step}"
    folder.mkdir(parents=True)
    state = state_dict(seed)
    names = sorted(state)
    weight_map = {}
    for number in range(3):
        own = names[number::3]
        shard = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file({n: state[n] for n in own}, folder / shard)
        weight_map |= dict.fromkeys(own, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder.name


def write_torch(run: Path, step: int, seed: int) -> str:
    """One torch.save file."""
    run.mkdir(parents=True, exist_ok=True)
    path = run / f"net-{step}.pt"
    torch.save(state_dict(seed), path)
    return path.name


def save_file(state: dict[str, torch.Tensor], path: Path) -> None:
    """safetensors' own writer; it leaves files that only their owner can read, which tests need not."""
    safetensors.torch.save_file(state, path)
    path.chmod(0o644)


WRITERS = {"safetensors": write_safetensors, "sharded": write_sharded, "torch": write_torch}
