"""A small training that uses every generator there is: dropout, batch norm, AdamW, a schedule, a shuffled loader."""

from __future__ import annotations

import random

import numpy
import torch
from torch import nn

import ckptguard
from support.runs import QUICK


class Noisy(torch.utils.data.Dataset):
    """Rows that depend on Python's and NumPy's generators when they are drawn."""

    def __init__(self, rows: int) -> None:
        self.x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index] + 0.01 * random.random() + 0.01 * float(numpy.random.rand())
        return x, self.x[index].sum().reshape(1)


class Training:
    """Everything of one training, made the same way from a seed."""

    def __init__(self, seed: int = 7, rows: int = 40, *, own_generator: bool = False, workers: int = 0) -> None:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=7, gamma=0.5)
        generator = torch.Generator().manual_seed(seed) if own_generator else None
        self.loader = torch.utils.data.DataLoader(
            Noisy(rows), batch_size=8, shuffle=True, generator=generator, num_workers=workers
        )
        self.losses: dict[int, float] = {}

    def parts(self) -> dict[str, object]:
        """What a guard takes."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def update(self, step: int, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """One update; (loss, gradient norm)."""
        x, y = batch
        x = x + 0.001 * torch.randn_like(x) + 0.001 * random.random() + 0.001 * float(numpy.random.rand())
        self.model.train()
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.optimizer.step()
        self.scheduler.step()
        self.losses[step] = loss.item()
        return loss.detach(), norm

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of model and optimizer, by name."""
        found = {f"model.{n}": t.clone() for n, t in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{k}": torch.as_tensor(v).clone() for k, v in state.items()}
        return found


def assert_same(one: Training, other: Training) -> None:
    """Bit for bit: tensors, losses, learning rates."""
    a, b = one.tensors(), other.tensors()
    assert a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []
    assert one.losses == other.losses
    assert one.scheduler.state_dict() == other.scheduler.state_dict()
    assert one.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]


def train(training, run, total=17, save_every=4, at=None, **options):
    """Train under a guard; `at` maps a step to what happens after it, once. Returns the steps taken, in order."""
    at = dict(at or {})
    taken = []
    with ckptguard.TrainingGuard(run, **training.parts(), daemon="off", settings=QUICK, **options) as guard:
        for step, batch in guard.steps(training.loader, total=total, save_every=save_every):
            taken.append(step)
            loss, norm = training.update(step, batch)
            guard.observe(loss=loss, grad_norm=norm)
            if step in at:
                at.pop(step)(guard)
    return taken
