"""What a training script tells the test that watches it, in ``RUN.log``: where it started, and what it saved.

It reads the records of the run itself, and not by our code: a script goes on once somebody has judged what it saved,
so nothing depends on who is faster.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

PATIENCE, UNNOTICED = 240.0, 60.0  # only what goes wrong takes so long
LAST = int(os.environ.get("TRAINER_LAST", "4"))  # saves of one run
FROM = os.environ.get("TRAINER_FROM")  # a checkpoint that the user names instead of what the script finds by itself
_POISON = int(os.environ.get("TRAINER_POISON", "0"))  # the save from which on the first start has NaN
_WAITS = os.environ.get("TRAINER_WAITS", "1") == "1"


class Tells:
    """The log of one start. `run` is the folder that ckptguard is told of."""

    def __init__(self, run: Path) -> None:
        self.run, self.log = run, Path(f"{run}.log")
        self.is_first = not self.log.exists()
        self._seen: Counter[str] = Counter()

    def started(self, counter: int, state: Mapping[str, object] | None) -> None:
        """Training begins after so many saves, with these weights: None from scratch."""
        self._say("started", counter, state or {})
        self._seen = _judged(self.run)

    def is_poisoned(self, number: int) -> bool:
        """Whether the weights turn NaN before the save of this number."""
        return bool(_POISON) and self.is_first and number >= _POISON

    def batch(self, number: int, *shape: int) -> torch.Tensor:
        """The data of the updates before a save, with one NaN in it where it is poisoned."""
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(number))
        return (
            made.flatten().index_fill(0, torch.tensor([3]), torch.nan).view(shape) if self.is_poisoned(number) else made
        )

    def saved(self, number: int, state: Mapping[str, object], *paths: str | Path) -> None:
        """The save of this number is written, under these paths in the run. Comes back once each was judged again."""
        names = [
            Path(path).relative_to(self.run).as_posix() if Path(path).is_absolute() else str(path) for path in paths
        ]
        self._say("saved", number, state, names)
        deadline = time.monotonic() + PATIENCE
        while _WAITS and any(_judged(self.run)[name] <= self._seen[name] for name in names):
            assert time.monotonic() < deadline, f"no verdict on {names} of save {number}: {_judged(self.run)}"
            time.sleep(0.02)
        self._seen = _judged(self.run)
        if number >= LAST and self.is_poisoned(number):
            time.sleep(UNNOTICED)  # a real training would still be at it; supervise is to end us
            sys.exit("nobody has noticed the NaN")

    def _say(self, what: str, counter: int, state: Mapping[str, object], paths: list[str] | None = None) -> None:
        tensors = {name: value for name, value in sorted(state.items()) if isinstance(value, torch.Tensor)}
        digest = hashlib.sha256()
        for name, value in tensors.items():
            digest.update(name.encode() + value.detach().float().cpu().numpy().tobytes())
        finite = all(bool(value.isfinite().all()) for value in tensors.values() if value.is_floating_point())
        line = {"what": what, "counter": counter, "sum": digest.hexdigest(), "finite": finite, "paths": paths or []}
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _judged(run: Path) -> Counter[str]:
    """How many verdicts each path has."""
    found: Counter[str] = Counter()
    for verdict in run.glob("_ckptguard/ledger/*/*.json"):
        id = re.sub(r"\.\d+\.[a-z]+$", "", verdict.stem)
        manifest = run / "_ckptguard/manifests" / verdict.parent.name / f"{id}.json"
        if manifest.exists():
            found[json.loads(manifest.read_text(encoding="utf-8").splitlines()[0])["path"]] += 1
    return found


def small_model() -> torch.nn.Module:
    """A network that trains in no time, equal at each start."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 16))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Two updates; the loss."""
    for _ in range(2):
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


RUN = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
