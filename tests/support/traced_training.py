"""A small guarded training as a program: says when it has begun, and at its end what it learnt."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import torch
from blake3 import blake3

import ckptguard
from ckptguard.errors import CkptguardError
from support.runs import QUICK

TOTAL = 7


def train(run: str) -> str:
    """Train to the end; the digest of the weights."""
    logging.raiseExceptions = False  # a log that cannot be written is nothing of ours
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckptguard.TrainingGuard(run, model=model, optimizer=optimizer, daemon="off", settings=QUICK) as guard:
        for step, number in guard.steps(list(range(4)), total=TOTAL, save_every=3):
            os.writev(1, [b"begun\n" if step == 1 else b""])  # no call that may be failed
            loss = model(torch.full((1, 20), float(number + 1))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            guard.observe(loss)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return blake3(weights.numpy().tobytes()).hexdigest()


def main(argv: list[str], **_: Any) -> None:
    """What a guard refuses at its beginning is one sentence."""
    try:
        learnt = train(*argv)
    except CkptguardError as error:
        os.writev(2, [f"{type(error).__name__}: {error}\n".encode()])
        raise SystemExit(1) from error
    os.writev(1, [f"learnt {learnt}\n".encode()])


PROGRAM = SimpleNamespace(main=main)
