"""A training that is struck by faults, and an oracle that knows which states are worth going back to."""

from __future__ import annotations

import hashlib
import math
import os
import random
import threading

import torch
from torch import nn

from ckptguard.records.pins import pinned_generations
from ckptguard.records.run import open_run
from ckptguard.runs.history import load_history
from ckptguard.training.saving import destinations, stores
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import Verification, verify_checkpoint
from support.views import look

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

    def save(self, path, step):
        """The user's own file."""
        scale = self.scaler.scale if self.scaler is not None else None
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "scale": scale}
        torch.save(state, path)

    def load(self, path):
        """The same, loaded."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None:
            self.scaler.scale = state["scale"]

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
    """Watches saves and loads from outside of the guard. `wrong` holds every load that should not have been.
    `unrecorded()`: whether no verdict can be written now."""

    def __init__(self, training: Struck, guard, unrecorded=lambda: False) -> None:
        self.training, self.saved, self.wrong, self.loads = training, {}, [], 0
        progress, store = guard._progress, guard._store
        self._extra, self._arrive, self._read = progress.extra, progress.arrive, store.read
        progress.extra, progress.arrive, store.read = self.extra, self.arrive, self.read
        self._progress, self._run, self._unrecorded = progress, open_run(guard.run), unrecorded

    def take_over(self, other: Oracle) -> Oracle:
        """What was saved in an earlier process."""
        self.saved, self.wrong = other.saved, other.wrong
        return self

    def extra(self):
        """A save begins: remember the state, and that it may be gone back to if it is finite."""
        if self.training.finite():
            self.saved.setdefault(self._progress.current, set()).add(self.training.digest())
        return self._extra()

    def read(self, manifest):
        """A load begins: what is loaded must be GOOD at this moment, in the records or, where nothing can be recorded,
        as it is read."""
        verdict = load_history(self._run).verdict(manifest.id)
        if not self._unrecorded() and manifest.id not in pinned_generations(self._run):
            self.wrong.append(f"{manifest.path} is loaded, and nothing pins it")
        if verdict is None and self._unrecorded():
            checkpoint = look(self._run).checkpoint(manifest.path)
            verdict = verify_checkpoint(look(self._run), checkpoint, Verification(md5=False, record=False))
        if verdict is None or verdict.outcome is not Outcome.GOOD:
            self.wrong.append(f"{manifest.path} is loaded, and it is {verdict and verdict.outcome}")
        return self._read(manifest)

    def arrive(self, step, extra, **options):
        """A load is done: the state must be, bit for bit, one that was saved finite at that step."""
        self.loads += 1
        if not self.training.finite():
            self.wrong.append(f"step {step} was loaded with numbers that are not finite")
        elif self.training.digest() not in self.saved.get(step, ()):
            self.wrong.append(f"step {step} was loaded, and is none of the states saved there")
        return self._arrive(step, extra, **options)


def saves(run):
    """The checkpoints of a run, files or folders, oldest first."""
    return sorted(run.glob("step-*"), key=lambda path: int(path.stem.partition("-")[2]))


def damage(run, generator: random.Random, newest: int) -> list[str]:
    """Damage the newest checkpoints of a run, all but the oldest, in ways that loaders do not notice."""
    checkpoints = saves(run)[1:]
    struck = []
    for checkpoint in checkpoints[-newest:]:
        inside = [checkpoint] if checkpoint.is_file() else checkpoint.iterdir()
        file = generator.choice(sorted(f for f in inside if f.is_file() and f.stat().st_size))
        how = generator.choice(("flip", "cut", "gone", "zeros"))
        struck.append(f"{file.relative_to(run)}: {how}")
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


class HeldSave:
    """The next save behind training's back stops at a point ("write": before its first byte, "seal": before its
    manifest) until it is let go, or killed there."""

    def __init__(self, monkeypatch) -> None:
        self._where, self._killed, self._go = None, False, threading.Event()
        self.reached = threading.Event()
        for module, name, where in ((stores, "write_checkpoint", "write"), (destinations, "seal_written", "seal")):
            monkeypatch.setattr(module, name, self._stopping(getattr(module, name), where))

    def arm(self, where: str) -> None:
        """Stop the next one there."""
        self._where = where

    def let_go(self, *, killed: bool = False) -> None:
        """It goes on, or ends as in a process that was killed."""
        self._killed = killed
        self._go.set()

    def _stopping(self, real, where):
        def stop(*arguments, **options):
            if self._where == where and threading.current_thread().name.startswith("ckptguard-save"):
                self._where = None
                self.reached.set()
                assert self._go.wait(60)
                if self._killed:
                    raise SystemExit
            return real(*arguments, **options)

        return stop
