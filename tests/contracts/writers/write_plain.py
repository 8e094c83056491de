"""Runs of plain torch loops: nested.pt per step, a legacy (non-zip) file, an EMA and a scalar that is infinite."""

from __future__ import annotations

from pathlib import Path

import torch
from evidence import record
from small_model import train

STEPS = (100, 200, 300)


def write_plain(run: Path) -> None:
    """``model_step_N.pt`` with everything that a loop keeps."""
    run.mkdir(parents=True)
    for state in train(seed=0, steps=STEPS):
        content = {
            "step": state.step,
            "epoch": 0,
            "model": state.model,
            "ema": {name: value.float() * 0.5 for name, value in state.model.items() if name != "mask"},
            "optimizer": state.optimizer,
            "scheduler": state.scheduler,
            "rng": torch.get_rng_state(),
            "best_loss": float("inf"),
            "best": torch.tensor(float("inf")),
        }
        torch.save(content, run / f"model_step_{state.step}.pt")
        record(run, state.step, content=content)


def write_legacy(run: Path) -> None:
    """``net-N.pth`` in the format before zip: no checksum anywhere."""
    run.mkdir(parents=True)
    for state in train(seed=1, steps=STEPS):
        torch.save(state.model, run / f"net-{state.step}.pth", _use_new_zipfile_serialization=False)
        record(run, state.step, content=state.model)
