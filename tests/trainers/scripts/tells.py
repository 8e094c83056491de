"""What a training script tells the test that watches it, in ``RUN.log``: where it started, and what it saved.

It reads the records of the run itself, and not by our code: a script goes on once somebody has judged what it saved,
so nothing depends on who is faster.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

PATIENCE = float(os.environ.get("TRAINER_PATIENCE", "240"))  # only what goes wrong takes so long
LAST = int(os.environ.get("TRAINER_LAST", "4"))  # saves of one run
KEEP = int(os.environ.get("TRAINER_KEEP", "0"))  # saves that stay, where the user removes the oldest; 0 for all
FROM = os.environ.get("TRAINER_FROM")  # a checkpoint that the user names instead of what the script finds by itself
_SCRATCH = os.environ.get("TRAINER_SCRATCH") == "1"  # nobody names a checkpoint
_POISON = os.environ.get("TRAINER_POISON", "")  # the save from which on there is NaN: "3", or "G=3,D=4" for parts
_KILL = int(os.environ.get("TRAINER_KILL", "0"))  # the write of this start within which the process dies
_START = int(os.environ.get("TRAINER_START", "0"))  # the start that is poisoned or killed
_EVERY = float(os.environ.get("TRAINER_EVERY", "0"))  # seconds from save to save
_WAITS = os.environ.get("TRAINER_WAITS", "1") == "1"
_IS_STOPPED = os.environ.get("TRAINER_IS_STOPPED") == "1"  # whether somebody is to end it once there is NaN
_CUT = 2048  # bytes: less than any file that is killed in


class Tells:
    """The log of one start. `run` is the folder that ckptguard is told of."""

    def __init__(self, run: Path) -> None:
        self.run, self.log = run, Path(f"{run}.log")
        self._said = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        self._is_the_one = sum(line["what"] == "started" for line in self._said) == _START
        self._turns = dict(one.split("=") for one in _POISON.split(",")) if "=" in _POISON else {"": _POISON}
        self._seen: Counter[str] = Counter()
        self._writes, self._saved_at = 0, time.monotonic()
        save = torch.save

        def noted(*given: object, **named: object) -> None:
            self.writes()
            save(*given, **named)

        torch.save = noted

    def started(self, counter: int, state: Mapping[str, object] | None) -> None:
        """Training begins after so many saves, with this state of each of its parts: None from scratch."""
        self._say("started", counter, state or {})
        self._seen = _judged(self.run)

    def writes(self) -> None:
        """A file is written next. Dies in the middle of it, as by ``kill -9``, where it is the one to die in."""
        self._writes += 1
        if self._is_the_one and self._writes == _KILL:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends whoever writes beyond the limit
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (_CUT, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def is_poisoned(self, number: int, part: str = "") -> bool:
        """Whether the weights, or those of a part, turn NaN before the save of this number."""
        turn = self._turns.get(part) or self._turns.get("")
        return bool(turn) and self._is_the_one and number >= int(turn)

    def poison(self, number: int, parts: Mapping[str, object]) -> None:
        """Make every number NaN of each part whose turn has come: modules, optimizers, and tensors in lists."""
        for name, part in parts.items():
            if self.is_poisoned(number, name):
                state = part.state_dict() if hasattr(part, "state_dict") else {"": part}
                for _, value in _tensors(state):
                    if value.is_floating_point():
                        value.detach().fill_(torch.nan)

    def batch(self, number: int, *shape: int) -> torch.Tensor:
        """The data of the updates before a save, with one NaN in it where it is poisoned."""
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(number))
        return (
            made.flatten().index_fill(0, torch.tensor([3]), torch.nan).view(shape) if self.is_poisoned(number) else made
        )

    def number_of(self, state: Mapping[str, object]) -> int:
        """The last save that held this state, for a trainer that lets the user say where it goes on."""
        own = _digest(state)
        return max((line["counter"] for line in self._said if line["sum"] == own), default=0)

    def saved(self, number: int, state: Mapping[str, object], *paths: str | Path, more: tuple = ()) -> None:
        """The save of this number is written, under these paths in the run, and more files of it that are no
        checkpoints of their own. Comes back once each path was judged again."""
        names = [self._name(path) for path in paths]
        self._remove_the_oldest(number, names)
        self._say("saved", number, state, names, [*names, *map(self._name, more)])
        deadline = time.monotonic() + PATIENCE
        while _WAITS and any(_judged(self.run)[name] <= self._seen[name] for name in names):
            assert time.monotonic() < deadline, f"no verdict on {names} of save {number}: {_judged(self.run)}"
            time.sleep(0.02)
        self._seen = _judged(self.run)
        if _IS_STOPPED and number >= LAST and self.is_poisoned(number):
            time.sleep(PATIENCE / 4)  # a real training would still be at it
            sys.exit("nobody has noticed the NaN")
        time.sleep(max(0.0, self._saved_at + _EVERY - time.monotonic()))
        self._saved_at = time.monotonic()

    def _name(self, path: str | Path) -> str:
        return Path(path).relative_to(self.run).as_posix() if Path(path).is_absolute() else str(path)

    def _remove_the_oldest(self, number: int, names: list[str]) -> None:
        """What only saves wrote that are no longer wanted goes."""
        saves = [line for line in self._said if line["what"] == "saved" and line["counter"] < number]
        wanted = {number - n for n in range(KEEP)}
        kept = {*names, *(file for line in saves if line["counter"] in wanted for file in line["files"])}
        for name in {file for line in saves for file in line["files"]} - kept if KEEP else ():
            (self.run / name).unlink(missing_ok=True)

    def _say(
        self, what: str, counter: int, state: Mapping[str, object], paths: list[str] = (), of: list[str] = ()
    ) -> None:
        parts = {name: value for name, value in state.items() if isinstance(value, Mapping)}
        line = {
            "what": what,
            "counter": counter,
            "sum": _digest(state),
            "finite": all(bool(v.isfinite().all()) for _, v in _tensors(state) if v.is_floating_point()),
            "paths": paths or [],
            "parts": {name: _digest(part) for name, part in parts.items()},
            "files": {self._name(file): _sum_of(file) for name in of for file in _files(self.run / name)},
            "writes": self._writes,
        }
        if what == "saved":
            self._writes = 0
        self._said.append(line)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _tensors(state: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state, each with its name, in the order of their names."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key in sorted(state, key=str):
            yield from _tensors(state[key], f"{name}.{key}" if name else str(key))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _tensors(value, f"{name}.{index}")


def _digest(state: object) -> str:
    digest = hashlib.sha256()
    for name, value in _tensors(state):
        digest.update(name.encode() + value.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _sum_of(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def _judged(run: Path) -> Counter[str]:
    """How many verdicts each path has."""
    found: Counter[str] = Counter()
    for verdict in run.glob("_ckptguard/ledger/*/*.json"):
        id = re.sub(r"\.\d+\.[a-z]+$", "", verdict.stem)
        manifest = run / "_ckptguard/manifests" / verdict.parent.name / f"{id}.json"
        if manifest.exists():
            found[json.loads(manifest.read_text(encoding="utf-8").splitlines()[0])["path"]] += 1
    return found


def small_model(seed: int = 0) -> torch.nn.Module:
    """A network that trains in no time, equal at each start."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 16))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Two updates; the loss."""
    for _ in range(2):
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def newest(pattern: str) -> Path | None:
    """The file of the run that matches and whose last number is the highest, as a user or a trainer looks for it."""
    if _SCRATCH:
        return None
    found = [(int(re.findall(r"\d+", path.name)[-1]), path) for path in RUN.glob(pattern)]
    return max(found)[1] if found else None


RUN = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
