"""A training of a few parameters into which one fault is put, under a guard that replays before it skips."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch

import ckptguard
from ckptguard.records.incidents import Incident, list_incidents
from ckptguard.records.run import open_run
from support.runs import QUICK

TOTAL, SAVE_EVERY = 24, 6
FOREVER = ("nan_batch", "inf_batch", "half")  # of a batch: they do it every time
ONCE = ("weight", "gradient", "optimizer", "buffer", "race")  # of a moment: they do it once
NOISY = ("noise", "noise_and_batch")
KINDS = (*FOREVER, *ONCE, *NOISY)


@dataclass(frozen=True)
class Fault:
    """What happens in the update `at`, or with its batch. A flip of `bit` in the element `place`, or one that leaves
    `nan` there. `rank` has it."""

    kind: str
    at: int
    bit: int = 30
    place: int = 0
    nan: bool = False
    rank: int = 0


class SameIterator:
    """A loader whose iterators are all one: it cannot be gone back in."""

    def __init__(self, data: list[torch.Tensor]) -> None:
        self._iterator = iter(data)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._iterator


class Struck:
    """A training with a fault. `steps` are the updates in the order in which they were made."""

    def __init__(self, fault: Fault | None, seed: int = 0, *, size: int = 1, rank: int = 0) -> None:
        torch.manual_seed(seed)
        self.fault, self.rank, self.steps = fault, rank, list[int]()
        self.data = [torch.randn(4, 3, generator=torch.Generator().manual_seed(99 * n + rank)) for n in range(60)]
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.trained = torch.nn.parallel.DistributedDataParallel(self.model) if size > 1 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self._struck = False

    def run(self, folder: str, *, loader=None, told=("loss", "grad_norm"), total=TOTAL, end=None, **options):
        """Train, and report of each update what is in `told`. Returns the incidents."""
        options = {"policy": ckptguard.RollbackPolicy(first="replay")} | options
        with ckptguard.TrainingGuard(
            folder, model=self.trained, optimizer=self.optimizer, daemon="off", settings=QUICK, **options
        ) as guard:
            for step, x in guard.steps(self.data if loader is None else loader, total=total, save_every=SAVE_EVERY):
                self.steps.append(step)
                number = next(n for n, batch in enumerate(self.data) if batch is x)
                loss, norm = self.update(step, number, x)
                numbers = {"loss": loss.detach(), "grad_norm": norm}
                guard.observe(**{name: numbers[name] for name in told})
                if end is not None and end(len(self.steps), guard):
                    break
        return incidents_of(folder)

    def update(self, step: int, number: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One update; returns (loss, gradient norm)."""
        fault = self.fault if self.fault is not None and self.fault.rank == self.rank else None
        kind = fault.kind if fault is not None else ""
        once = fault is not None and kind in ONCE and step == fault.at and not self._struck
        self._struck = self._struck or once
        if fault is not None and kind in (*FOREVER, "noise_and_batch") and number == fault.at - 1:
            x = x * {"nan_batch": float("nan"), "half": 1.0}.get(kind, float("inf"))
        y = self.trained(x)
        if kind == "half":
            y = (y.half() * (30000 if number == fault.at - 1 else 10)).float() / 10
        loss = y.square().mean()
        if once and kind == "race":
            loss = loss * float("nan")
        self.optimizer.zero_grad()
        loss.backward()
        if once and kind == "gradient":
            flip(next(self.model.parameters()).grad, fault)
        if kind in NOISY:
            for parameter in self.model.parameters():
                parameter.grad *= 1 + os.urandom(1)[0] / 100 + os.urandom(1)[0] / 1e4
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        if kind == "noise" and step == fault.at and not self._struck:
            self._struck, norm = True, norm * float("nan")
        self.optimizer.step()
        if once and kind == "weight":
            flip(next(self.model.parameters()).data, fault)
        if once and kind == "buffer":
            flip(self.model[1].running_var, fault)
        if once and kind == "optimizer":
            flip(next(iter(self.optimizer.state.values()))[("exp_avg", "exp_avg_sq")[fault.place % 2]], fault)
        return loss, norm


def flip(tensor: torch.Tensor, fault: Fault) -> None:
    """Flip one bit of one number."""
    numbers = tensor.view(-1)
    place = fault.place % len(numbers)
    if fault.nan:
        numbers[place] = float("nan")
        return
    (whole,) = struct.unpack("<I", struct.pack("<f", float(numbers[place])))
    numbers[place] = struct.unpack("<f", struct.pack("<I", whole ^ (1 << fault.bit)))[0]


def incidents_of(folder: str) -> list[Incident]:
    """The incidents of a run."""
    return list_incidents(open_run(folder))


def allowed(fault: Fault) -> set[str]:
    """The diagnoses of a fault that are not wrong."""
    if fault.kind in FOREVER:
        return {"deterministic", "cannot_tell"}
    if fault.kind in ONCE:
        return {"not_reproducible", "differs", "cannot_tell"}
    return {"differs", "cannot_tell"}
