"""A tiny training in plain torch, for the layouts whose writers are a few lines around torch.save."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch


class State(NamedTuple):
    """What training holds after some steps; nothing in it is shared with the training that goes on."""

    step: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]


class Model(torch.nn.Module):
    """Batch norm, a mask of -inf, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 8))
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


def build(seed: int):
    """Model, optimizer and a schedule that warms up from 0; equal for equal seeds."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))


def train(seed: int, steps: tuple[int, ...]) -> list[State]:
    """The states of a training, which updates twice between any two of the steps named."""
    model, optimizer, scheduler = build(seed)
    generator = torch.Generator().manual_seed(seed)
    states = []
    for step in steps:
        for _ in range(2):
            tokens = torch.randint(16, (32,), generator=generator)
            torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        held = (model.state_dict(), optimizer.state_dict(), scheduler.state_dict())
        states.append(State(step, *copy.deepcopy(held)))
    return states
