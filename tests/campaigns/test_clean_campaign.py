"""Clean checkpoints of many shapes: no false alarm, ever."""

from __future__ import annotations

import os
import random

import pytest
import torch
from support.runs import save_file
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.verdict import Outcome, Severity

COUNT = 500 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 60
PER_RUN = 5
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def weight(rng, *shape, dtype=None):
    """Values as training has them, sometimes tiny, sometimes large, sometimes all zero in a bias."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    scale = rng.choice([1.0, 1e-4, 30.0])
    return (torch.randn(*shape, generator=generator) * scale).to(dtype or rng.choice(FLOATS))


def model_state(rng, shape_seed):
    """A state dict whose names, shapes and dtypes depend on `shape_seed` alone."""
    shapes = random.Random(shape_seed)
    state = {}
    for layer in range(shapes.randrange(1, 6)):
        rows, columns = shapes.randrange(1, 40), shapes.randrange(1, 40)
        dtype = shapes.choice(FLOATS)
        state[f"h.{layer}.weight"] = weight(rng, rows, columns, dtype=dtype)
        state[f"h.{layer}.bias"] = (
            torch.zeros(rows, dtype=dtype) if shapes.random() < 0.5 else weight(rng, rows, dtype=dtype)
        )
        if shapes.random() < 0.3:
            state[f"h.{layer}.mask"] = torch.triu(torch.full((8, 8), float("-inf")), diagonal=1)
        if shapes.random() < 0.3:
            state[f"h.{layer}.bn.running_mean"] = weight(rng, rows, dtype=torch.float32)
            state[f"h.{layer}.bn.running_var"] = torch.ones(rows)
            state[f"h.{layer}.bn.num_batches_tracked"] = torch.tensor(rng.randrange(1000))
        if shapes.random() < 0.2:
            state[f"h.{layer}.empty"] = torch.empty(0, 4)
        if shapes.random() < 0.2:
            state[f"h.{layer}.rope"] = torch.polar(torch.ones(4), torch.arange(4.0))
    if shapes.random() < 0.3:
        state["logit_scale"] = torch.tensor(2.65)
    if shapes.random() < 0.3:
        state["flags"] = torch.tensor([True, False])
    return state


def training_state(rng, shape_seed):
    """A nested checkpoint: model, optimizer after real steps, scheduler with an infinite best, scaler, RNG."""
    torch.manual_seed(rng.randrange(2**31))
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    shapes = random.Random(shape_seed)
    kinds = (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    optimizer = shapes.choice(kinds)(model.parameters(), lr=shapes.choice([0.0, 1e-3]))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": plateau.state_dict(),
        "scaler": {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3},
        "rng": {"torch": torch.get_rng_state(), "python": random.Random(1).getstate()},
        "best": torch.tensor(float("inf")),
        "best_metric": float("inf"),
        "step": 2,
    }


def write(rng, shape_seed, kind, folder, step):
    """One checkpoint of a kind."""
    if kind == "safetensors":
        state = {k: v.contiguous() for k, v in model_state(rng, shape_seed).items() if not v.is_complex()}
        (folder / f"m-{step}").mkdir()
        save_file(state, folder / f"m-{step}" / "model.safetensors")
    elif kind == "torch":
        state = model_state(rng, shape_seed)
        name = sorted(state)[0]
        state["tied"] = state[name]
        state["view"] = state[name].t() if state[name].ndim == 2 else state[name]
        torch.save(state, folder / f"net-{step}.pt")
    else:
        torch.save(training_state(rng, shape_seed), folder / f"train-{step}.ckpt")


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["safetensors", "torch", "training"])
def test_clean_checkpoints_are_good(kind, tmp_path):
    """Every clean checkpoint is GOOD, with no warning; -inf masks, infinite bests, lr 0 and views are no alarm."""
    for number in range(COUNT // PER_RUN // 3 + 1):
        rng = random.Random(number)
        folder = tmp_path / str(number)
        folder.mkdir()
        for step in range(1, PER_RUN + 1):
            write(rng, number, kind, folder, step)
        done = reconcile(look(open_run(str(folder))), PassNotes())
        assert len(done.checked) == PER_RUN
        for checked in done.checked:
            heavy = [f for f in checked.findings if f.severity is not Severity.NOTICE]
            assert checked.outcome is Outcome.GOOD, f"kind={kind} seed={number}: {checked}"
            assert heavy == [], f"kind={kind} seed={number}: {heavy}"
