"""A run as Hallo leaves it: ``checkpoints/checkpoint-N`` by accelerate with DeepSpeed, then ``modules/net-N.pth``.

Its training needs CUDA and diffusers; the checkpoints are those that accelerate wrote for the same step, the modules
its ``torch.save`` of a state dict.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from evidence import record
from small_model import train

PARTS = ("reference_unet", "denoising_unet")


def write_hallo(run: Path, accelerate_run: Path, steps: tuple[int, ...]) -> None:
    """The checkpoint of a step first, its modules last of all; at the end the newest modules once more."""
    (run / "modules").mkdir(parents=True)
    (run / "validation").mkdir()
    (run / "config.yaml").write_text("checkpointing_steps: 2\n", encoding="utf-8")
    parts = [train(seed=seed, steps=steps) for seed, _ in enumerate(PARTS)]
    for states in zip(*parts, strict=True):
        step = states[0].step
        shutil.copytree(accelerate_run / f"checkpoint-{step}", run / "checkpoints" / f"checkpoint-{step}")
        for part, state in zip(PARTS, states, strict=True):
            torch.save(state.model, run / "modules" / f"{part}-{step}.pth")
        record(run, step, **{part: state.model for part, state in zip(PARTS, states, strict=True)})
    for part in PARTS:
        shutil.copy(run / "modules" / f"{part}-{steps[-1]}.pth", run / f"{part}.pth")
