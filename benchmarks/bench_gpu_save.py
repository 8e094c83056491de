"""Saving behind a training on a GPU: for how long does it stall, and how much slower are updates meanwhile?

    python -m benchmarks.bench_gpu_save [--size-gib 4] [--runs 7] [--folder DIR]

Each way saves the same state, in a shuffled order, under a new name each time; the first round, which makes every
way's memory, is left out. The stall is what a call takes on a device that is idle, and `to durable` is until the
checkpoint can be used. Then updates go on while it is written: their median beside that of updates beside nothing.
Ways: `TrainingGuard.save(blocking=False)`; `torch.distributed.checkpoint.async_save` with pinned memory, staged before
it returns, and staged behind training, which must then not change the state before that is over: its stall ends there.
One copy of the state into pinned memory that is there already says what cannot be undercut. Needs a CUDA device.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import ckptguard
from benchmarks.bench_save import SIDE, clear, show, state_of, training
from benchmarks.measuring import options, seconds

Note = Callable[[str, float], None]


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One update, done when this returns."""
    model(torch.randn(512, SIDE, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()


def updates(model: torch.nn.Module, optimizer: torch.optim.Optimizer, until: Callable[[], bool]) -> float:
    """The median seconds of updates until something is over, at least three."""
    found: list[float] = []
    while len(found) < 3 or not until():
        found.append(seconds(lambda: update(model, optimizer)))
    return statistics.median(found)


def main() -> None:
    """Measure every way in turns."""
    given = options(__doc__, size_gib=4.0, runs=7, folder=Path)
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device: bench_save.py measures the same on a CPU")
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        measure(Path(name), given.size_gib, given.runs)


def measure(folder: Path, size_gib: float, runs: int) -> None:
    """Print what each way takes, and the ratios."""
    model, optimizer = training(size_gib, "cuda")
    guard = ckptguard.TrainingGuard(folder / "run", model=model, optimizer=optimizer, daemon="off")
    room = {
        key: torch.empty_like(value, device="cpu").pin_memory() for key, value in state_of(model, optimizer).items()
    }
    steps, took = itertools.count(), {}

    def note(what: str, value: float) -> None:
        took.setdefault(what, []).append(value)

    def copy() -> None:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for key, value in state_of(model, optimizer).items():
            room[key].copy_(value, non_blocking=True)
        torch.cuda.synchronize()
        note("one copy: stall", time.perf_counter() - began)

    def ours() -> None:
        torch.cuda.synchronize()
        began = time.perf_counter()
        guard.save(step=next(steps), blocking=False)
        note("guard.save: stall", time.perf_counter() - began)
        note("guard.save: an update meanwhile", updates(model, optimizer, lambda: guard.wait_for_save(0)))
        guard.wait_for_save()
        note("guard.save: to durable", time.perf_counter() - began)

    def theirs(name: str, stager: DefaultStager) -> None:
        torch.cuda.synchronize()
        began = time.perf_counter()
        answer: Any = dcp.async_save(
            state_of(model, optimizer), checkpoint_id=folder / "dcp", async_stager=stager, no_dist=True
        )
        staged, uploaded = getattr(answer, "staging_completion", None), getattr(answer, "upload_completion", answer)
        if staged is not None:
            staged.result()
        note(f"{name}: stall", time.perf_counter() - began)
        note(f"{name}: an update meanwhile", updates(model, optimizer, uploaded.done))
        uploaded.result()
        note(f"{name}: to durable", time.perf_counter() - began)

    stagers = {
        "DCP, staged at once": DefaultStager(StagingOptions(True, False, False, True)),
        "DCP, staged behind": DefaultStager(StagingOptions(True, False, True, True)),
    }
    ways = [copy, ours, *(lambda name=name, stager=stager: theirs(name, stager) for name, stager in stagers.items())]
    shuffled = random.Random(runs)
    for _ in range(runs + 1):
        for way in shuffled.sample(ways, len(ways)):
            clear(folder)
            way()
        note("nothing: an update meanwhile", updates(model, optimizer, lambda: True))
    for stager in stagers.values():
        stager.close()
    took = {what: values[1:] for what, values in took.items()}
    size = sum(value.nbytes for value in room.values()) / 2**30
    print(f"{size:.2f} GiB on {torch.cuda.get_device_name()}, medians of {runs} runs")
    for what, values in sorted(took.items()):
        print(f"  {what:42} {statistics.median(values) * 1e3:9.1f} ms")
    rows = (
        ("guard.save: stall", "one copy: stall", 1.3),
        ("guard.save: stall", "DCP, staged at once: stall", 1.0),
        ("guard.save: stall", "DCP, staged behind: stall", 1.0),
        ("guard.save: an update meanwhile", "nothing: an update meanwhile", None),
        ("guard.save: to durable", "DCP, staged at once: to durable", None),
    )
    show(took, rows)


if __name__ == "__main__":
    main()
