"""Counters inside checkpoints, and names that contradict them."""

from __future__ import annotations

import json

import pytest
import torch

from ckptguard.runs.run_view import open_view
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verify.checkpoint import verify_checkpoint

_SCHEDULES = {"config": {"step": 7}, "args": {"iteration": 8}, "hyper_parameters": {"global_step": 9}}


def _sealed(run, name):
    """Verify one checkpoint of a run; its manifest, and what was found."""
    view = open_view(str(run), Settings())
    checked = verify_checkpoint(view, view.checkpoint(name))
    assert checked.outcome is Outcome.GOOD
    return view.history.manifest(checked.id), checked.findings


def _state(**beside):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randn(1, 3)).sum().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **beside}


@pytest.mark.parametrize(
    ("beside", "kinds"),
    [
        ({}, {"optimizer step": 4}),
        ({"iter_num": 3500, **_SCHEDULES}, {"iter_num": 3500, "optimizer step": 4}),
        ({"epoch": 3, "global_step": 12}, {"global_step": 12, "optimizer step": 4, "epoch": 3}),
        ({"epoch": -1}, {"optimizer step": 4}),
        ({"epoch": True, "step": 2.5, "iteration": float("inf")}, {"optimizer step": 4}),
        ({"extra": {"epoch": 9}, "epoch": 2}, {"optimizer step": 4, "epoch": 2}),
        ({"history": [{"num_updates": 100}, {"num_updates": 200}]}, {"num_updates": 200, "optimizer step": 4}),
    ],
)
def test_what_counts(tmp_path, beside, kinds):
    """The outermost counter of a kind, and of equally deep ones the highest; nothing that a user set."""
    torch.save(_state(**beside), tmp_path / "ckpt.pt")
    if beside.get("iteration"):
        beside.pop("iteration")  # a number that is not finite has its own finding
        torch.save(_state(**beside), tmp_path / "ckpt.pt")
    manifest, _ = _sealed(tmp_path, "ckpt.pt")
    assert {c.kind: c.value for c in manifest.counters} == kinds
    assert all(c.source.startswith("ckpt.pt: ") for c in manifest.counters)
    assert manifest.training_step == next((v for k, v in kinds.items() if k != "epoch"), None)


def test_a_counter_in_json(tmp_path):
    """Beside weights: Hugging Face's ``trainer_state.json``."""
    folder = tmp_path / "checkpoint-40"
    folder.mkdir()
    torch.save(torch.nn.Linear(3, 2).state_dict(), folder / "pytorch_model.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 40, "epoch": 2.0, "log_history": []}))
    manifest, _ = _sealed(tmp_path, "checkpoint-40")
    assert {c.kind: c.value for c in manifest.counters} == {"global_step": 40, "epoch": 2}


def test_a_name_that_contradicts_its_counter_is_warned_of(tmp_path):
    """The numbers of ``acc_91_500`` and ``acc_87_1000`` are no order: the warning says what to do."""
    torch.save(_state(global_step=1000), tmp_path / "acc_87_1000.pt")
    torch.save(_state(global_step=500), tmp_path / "acc_91_500.pt")
    assert not [f for f in _sealed(tmp_path, "acc_87_1000.pt")[1] if f.check == "order"]
    [found] = [f for f in _sealed(tmp_path, "acc_91_500.pt")[1] if f.check == "order"]
    assert "acc_87_1000.pt" in found.message
    assert "pattern" in found.message
