"""A training that is struck by faults, and an oracle that knows which states are worth going back to."""

from __future__ import annotations

import hashlib
import math
import os
import random

import torch
from torch import nn

TOTAL, SAVE_EVERY = 16, 3


class Scaler:
    """A loss scaler as a guard sees it."""

    def __init__(self):
        self.scale = 1024.0

    def get_scale(self):
        return self.scale

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"]


class Struck:
    """A small training of one process. `strike(name, ...)` decides what goes wrong at each update."""

    def __init__(self, seed: int, *, scaler: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = Scaler() if scaler else None
        data = torch.randn(12 * 8, 6, generator=torch.Generator().manual_seed(seed))
        self.loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8)
        self.made = 0  # updates in the order they were made, replays included

    def parts(self):
        """What a guard takes."""
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def update(self, x, fault=None):
        """One update with a fault, if any; (loss, norm, skipped)."""
        self.made += 1
        self.model.train()
        if fault == "input":
            x = x.clone()
            x[0, 0] = math.nan
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        weight = self.model[3].weight
        if fault == "gradient":
            weight.grad[0, 0] = math.nan
        if fault == "spike":
            for parameter in self.model.parameters():
                parameter.grad *= 1e12
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        skipped = self.scaler is not None and (fault == "scale" or not math.isfinite(norm))
        if self.scaler is not None and skipped:
            self.scaler.scale /= 2
            norm = torch.tensor(math.inf)
        else:
            self.optimizer.step()
        with torch.no_grad():
            if fault == "weight":
                weight[0, 0] = math.inf
            elif fault == "buffer":
                self.model[1].running_var[3] = math.nan
            elif fault == "optimizer":
                self.optimizer.state[weight]["exp_avg"][0, 0] = math.nan
            elif fault == "spike":
                for parameter in self.model.parameters():
                    parameter.mul_(1e4)
        return loss.detach(), norm

    def tensors(self):
        """Every tensor that is saved."""
        yield from self.model.state_dict().values()
        for state in self.optimizer.state_dict()["state"].values():
            yield from (torch.as_tensor(value) for value in state.values())

    def finite(self):
        """Whether training is healthy."""
        return all(bool(t.isfinite().all()) for t in self.tensors())

    def digest(self):
        """The whole state in one short text."""
        found = hashlib.sha256()
        for tensor in self.tensors():
            found.update(tensor.detach().contiguous().numpy().tobytes())
        return found.hexdigest()


class Oracle:
    """Watches saves and loads from outside of the guard. `wrong` holds every load that should not have been."""

    def __init__(self, training: Struck, progress) -> None:
        self.training, self.saved, self.wrong, self.loads = training, {}, [], 0
        self._extra, self._arrive = progress.extra, progress.arrive
        progress.extra, progress.arrive = self.extra, self.arrive
        self._progress = progress

    def take_over(self, other: Oracle) -> Oracle:
        """What was saved in an earlier process."""
        self.saved, self.wrong = other.saved, other.wrong
        return self

    def extra(self):
        """A save begins: remember the state, and that it may be gone back to if it is finite."""
        if self.training.finite():
            self.saved.setdefault(self._progress.current, set()).add(self.training.digest())
        return self._extra()

    def arrive(self, step, extra, **options):
        """A load is done: the state must be, bit for bit, one that was saved finite at that step."""
        self.loads += 1
        if not self.training.finite():
            self.wrong.append(f"step {step} was loaded with numbers that are not finite")
        elif self.training.digest() not in self.saved.get(step, ()):
            self.wrong.append(f"step {step} was loaded, and is none of the states saved there")
        return self._arrive(step, extra, **options)


def damage(run, generator: random.Random, newest: int) -> list[str]:
    """Damage the newest checkpoints of a run, all but the oldest, in ways that loaders do not notice."""
    folders = sorted(run.glob("step-*"))[1:]
    struck = []
    for folder in folders[-newest:]:
        files = sorted(f for f in folder.iterdir() if f.is_file() and f.stat().st_size)
        file = generator.choice(files)
        how = generator.choice(("flip", "cut", "gone", "zeros"))
        struck.append(f"{folder.name}/{file.name}: {how}")
        if how == "gone":
            file.unlink()
            continue
        content = bytearray(file.read_bytes())
        place = generator.randrange(len(content))
        if how == "flip":
            content[place] ^= 1 << generator.randrange(8)
        elif how == "cut":
            del content[place:]
        else:
            content[place : place + 64] = bytes(len(content[place : place + 64]))
        file.write_bytes(content)  # in place: a kept copy that is a link is struck too
    return struck


class FullDisk:
    """Writing under a folder fails while `full` is set; whatever else the process writes is not touched."""

    def __init__(self, monkeypatch, folder) -> None:
        self.full = False
        self._folder = str(folder)
        for name in ("write", "pwrite"):
            monkeypatch.setattr(os, name, self._refusing(getattr(os, name)))

    def _refusing(self, real):
        def write(descriptor, *arguments):
            if self.full and os.readlink(f"/proc/self/fd/{descriptor}").startswith(self._folder):
                raise OSError(28, "No space left on device")
            return real(descriptor, *arguments)

        return write
