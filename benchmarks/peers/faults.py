"""The state of a small training, and twenty things that happen to its checkpoints."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

State = dict[str, Any]
LAYERS, WIDTH = 6, 64


def state_of(step: int, *, width: int = WIDTH) -> State:
    """What a training has at a step: weights, and the moments of Adam."""
    chance = torch.Generator().manual_seed(step)
    names = [f"layers.{number}.weight" for number in range(LAYERS)]
    model = {name: torch.randn(width, width, generator=chance) for name in names}
    moments = {
        number: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.randn(width, width, generator=chance) / 100,
            "exp_avg_sq": torch.rand(width, width, generator=chance) / 100,
        }
        for number in range(LAYERS)
    }
    groups = [{"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": list(range(LAYERS))}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


class Fault(NamedTuple):
    """One of them. `saved` changes the state that is saved. `harm` is done to the files of the newest save; it gets
    these, the largest first, those of the save before, and a file that a hostile pickle would make."""

    name: str
    saved: Callable[[State], None] | None = None
    harm: Callable[[list[Path], list[Path], random.Random, Path], bool] | None = None


def _change(path: Path, how: Callable[[bytearray], bytearray]) -> bool:
    """Change a file and leave its times alone, as failing hardware does. False if that changes nothing."""
    before, at = path.read_bytes(), path.stat()
    after = how(bytearray(before))
    path.chmod(0o644)
    path.write_bytes(after)
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    return before != bytes(after)


def _flip(path: Path, chance: random.Random) -> bool:
    def how(data: bytearray) -> bytearray:
        place = chance.randrange(len(data) // 4, max(3 * len(data) // 4, len(data) // 4 + 1))
        data[place] ^= 1 << chance.randrange(8)
        return data

    return _change(path, how)


def _zero_block(path: Path, chance: random.Random) -> bool:
    def how(data: bytearray) -> bytearray:
        block = min(4096, len(data) // 4)
        place = chance.randrange(len(data) // 4, len(data) - block)
        data[place : place + block] = bytes(block)
        return data

    return _change(path, how)


def _moved_block(path: Path, chance: random.Random) -> bool:
    """A block was written to the wrong place."""

    def how(data: bytearray) -> bytearray:
        block = min(4096, len(data) // 8)
        to = chance.randrange(len(data) // 2, len(data) - block)
        data[to : to + block] = data[len(data) // 4 : len(data) // 4 + block]
        return data

    return _change(path, how)


def _gone(path: Path) -> bool:
    path.unlink()
    return True


def _swap(files: list[Path]) -> bool:
    """Two files have each other's names."""
    if len(files) < 2 or files[0].read_bytes() == files[1].read_bytes():
        return False
    one, other = files[0].read_bytes(), files[1].read_bytes()
    return _change(files[0], lambda _: bytearray(other)) and _change(files[1], lambda _: bytearray(one))


def _older(path: Path, before: list[Path]) -> bool:
    """It is that of the save before, as a cache that was not emptied leaves it."""
    old = next((other for other in before if other.name == path.name), None)
    return old is not None and _change(path, lambda _: bytearray(old.read_bytes()))


class _Hostile:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.made),)


def _hostile(files: list[Path], made: Path) -> bool:
    """A pickle takes the place of a file that is one, or else of the largest, and makes a folder if it is run."""
    path = next((file for file in files if file.name == ".metadata"), files[0])
    return _change(path, lambda _: bytearray(pickle.dumps(_Hostile(made))))


def _nan(state: State) -> None:
    state["model"]["layers.3.weight"][5, 7] = float("nan")


def _infinite(state: State) -> None:
    state["optimizer"]["state"][2]["exp_avg_sq"][1, 1] = float("inf")


def _zeros(state: State) -> None:
    for weight in state["model"].values():
        weight.zero_()


def _dead(state: State) -> None:
    for weight in state["model"].values():
        weight.fill_(0.25)


def _missing(state: State) -> None:
    del state["model"]["layers.4.weight"]


def _renamed(state: State) -> None:
    state["model"] = {f"module.{name}": weight for name, weight in state["model"].items()}


def _reshaped(state: State) -> None:
    state["model"]["layers.1.weight"] = state["model"]["layers.1.weight"][:, : WIDTH // 2].clone()


def _old_moments(state: State) -> None:
    """The optimizer state was not updated, while the weights were."""
    state["optimizer"] = state_of(1)["optimizer"]


FAULTS = (
    Fault("one bit flipped in the largest file", harm=lambda files, _, chance, __: _flip(files[0], chance)),
    Fault("one bit flipped in the smallest file", harm=lambda files, _, chance, __: _flip(files[-1], chance)),
    Fault("a 4 KiB block of zeros", harm=lambda files, _, chance, __: _zero_block(files[0], chance)),
    Fault("a block written to the wrong place", harm=lambda files, _, chance, __: _moved_block(files[0], chance)),
    Fault("cut off", harm=lambda files, *_: _change(files[0], lambda data: data[: 2 * len(data) // 3])),
    Fault("its second half is zeros", harm=lambda files, *_: _change(files[0], _half)),
    Fault("bytes added at its end", harm=lambda files, *_: _change(files[0], lambda data: data + bytes(range(256)))),
    Fault("the largest file is missing", harm=lambda files, *_: _gone(files[0])),
    Fault("the smallest file is missing", harm=lambda files, *_: len(files) > 1 and _gone(files[-1])),
    Fault("two files swapped", harm=lambda files, *_: _swap(files)),
    Fault("a file of the save before", harm=lambda files, before, *_: _older(files[0], before)),
    Fault("a pickle that runs code", harm=lambda files, _, __, made: _hostile(files, made)),
    Fault("NaN in a weight", _nan),
    Fault("infinity in the optimizer state", _infinite),
    Fault("all weights are zero", _zeros),
    Fault("all weights are one constant", _dead),
    Fault("a tensor is missing", _missing),
    Fault("all tensors are renamed", _renamed),
    Fault("a tensor has another shape", _reshaped),
    Fault("the optimizer state of the save before", _old_moments),
)
HEALTHY = Fault("no fault (false alarms)")


def _half(data: bytearray) -> bytearray:
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
