"""The user's own save and load under several ranks: all take part, and one that fails is failure of all."""

import os

import pytest
import torch
from support.rank_processes import run_ranks

import ckptguard
from ckptguard.errors import CkptguardError
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import open_run
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings

pytestmark = pytest.mark.torch


def train(folder, broken_at):
    """A loop whose save writes on rank 0 only; at one step that of rank 1 fails. What each rank saw."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def save(path, step):
        calls.append(os.path.basename(path))
        if rank == 1 and step == broken_at:
            raise OSError("no space left for rank 1")
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step}, path)

    def load(path):
        model.load_state_dict(torch.load(path, weights_only=True)["model"])

    guard = ckptguard.TrainingGuard(
        folder, model=model, optimizer=optimizer, save=save, load=load, daemon="off", settings=Settings(settle=0.0)
    )
    for step, batch in guard.steps([torch.full((1, 2), rank + 1.0)] * 8, total=4, save_every=2):
        model(batch).sum().backward()
        optimizer.step()
        guard.observe()
        made = step
    guard.save(5, metrics={"loss": 1.5 + rank})
    told = None
    try:
        guard.save(6)
    except CkptguardError as error:
        told = error.message
    resumed = guard.resume()
    return [made, calls, told, resumed, sorted(n for n in os.listdir(folder) if n.endswith(".pt"))]


def test_a_rank_that_cannot_save_is_told_of_on_all(tmp_path):
    """Nothing is left of that save; the others are there, and all ranks resume at the same one."""
    answers = run_ranks(train, str(tmp_path), 6)
    for code, answer, err in answers:
        assert code == 0, err
        step, calls, told, resumed, files = answer
        assert calls == ["step-0.pt", "step-2.pt", "step-4.pt", "step-5.pt", "step-6.pt"]
        assert "no space left for rank 1" in told
        assert (step, resumed, files) == (4, 5, ["step-0.pt", "step-2.pt", "step-4.pt", "step-5.pt"])
    run = open_run(str(tmp_path))
    assert read_manifest(run, CheckpointId("step-#.pt", 5, 1)).metrics == {"loss": 1.5}  # those of rank 0
