"""A guarded training: ``train_guard.py RUN once|always``. The gradients of step 5 overflow."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import ckptguard

RUN, HOW = Path(sys.argv[1]), sys.argv[2]

with Path(f"{RUN}.starts").open("a", encoding="utf-8") as file:
    file.write("0\n")
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
guard = ckptguard.TrainingGuard(RUN, model=model, optimizer=optimizer, daemon="off")
sick = 0
for step, batch in guard.steps([torch.full((2, 4), i + 1.0) for i in range(6)], total=8, save_every=2):
    loss = model(batch).square().mean()
    if step == 5 and (sick == 0 or HOW == "always"):
        sick += 1
        loss = loss * 1e38 * 1e38  # overflows, and so do its gradients
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    guard.observe(loss=loss, grad_norm=torch.stack([p.grad.norm() for p in model.parameters()]).norm())
guard.close()
