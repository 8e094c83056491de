"""A run as nanoVLM leaves it: ``step_N/{config.json, model.safetensors}``, and a resumed run inside a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
from evidence import record
from small_model import Model, State, train

STEPS = (0, 500, 1000)


def write_nanovlm(run: Path) -> None:
    """Three steps; the run that was resumed from step_500 saved inside it."""
    for state in train(seed=0, steps=STEPS):
        save_pretrained(state, run / f"step_{state.step}")
        record(run, state.step, model=state.model)
    inner = run / "step_500" / "nanoVLM_resumed_0615-101500"
    for state in train(seed=1, steps=(200, 400)):
        save_pretrained(state, inner / f"step_{state.step}")


def save_pretrained(state: State, folder: Path) -> None:
    """nanoVLM's own: the configuration first; a tied weight is stored once and named in the header."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"lm_hidden_dim": 8, "tied": True}, indent=4), encoding="utf-8")
    model = Model()
    model.load_state_dict(state.model)
    safetensors.torch.save_model(model, str(folder / "model.safetensors"))
