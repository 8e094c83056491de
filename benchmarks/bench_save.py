"""Saving behind training: how long the call takes, and how long until the checkpoint is durable and sealed.

    python -m benchmarks.bench_save [--size-gib 2] [--runs 5] [--folder DIR]

Prints medians of ratios, taken in a shuffled order in one process: of the call to one copy of the state into memory
that is there already, and to `torch.distributed.checkpoint.async_save` with its cached stager; of call to sealed, and
of a save that blocks, to `safetensors.torch.save_file` with fsync of the same tensors. Every way writes a new name.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

import ckptguard
from benchmarks.measuring import median_ratio, options, seconds

SIDE = 4096


def training(size_gib: float, device: str = "cpu") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with AdamW whose state takes this much, a third of it weights."""
    layers = max(1, round(size_gib * 2**30 / (3 * SIDE * SIDE * 4)))
    model = torch.nn.Sequential(*[torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def main() -> None:
    """Measure every way in turns."""
    given = options(__doc__, size_gib=2.0, runs=5, folder=Path)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        measure(Path(name), given.size_gib, given.runs)


def measure(folder: Path, size_gib: float, runs: int) -> None:
    """Print the ratios."""
    model, optimizer = training(size_gib)
    state = state_of(model, optimizer)
    room = {key: torch.zeros_like(value) for key, value in state.items()}
    guard = ckptguard.TrainingGuard(folder / "run", model=model, optimizer=optimizer, daemon="off")
    # Neither pinned nor shared memory: there is no device here, and it writes from a thread as we do.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    took: dict[str, list[float]] = {}

    def note(way: str, value: float) -> None:
        took.setdefault(way, []).append(value)

    steps = itertools.count()

    def copy() -> None:
        note("copy", seconds(lambda: [room[key].copy_(value) for key, value in state.items()]))

    def by_hand() -> None:
        note("save_file + fsync", seconds(lambda: plain(state, folder / "plain.safetensors")))

    def behind() -> None:
        began = time.perf_counter()
        guard.save(step=next(steps), blocking=False)
        note("the call", time.perf_counter() - began)
        guard.wait_for_save()
        note("call to sealed", time.perf_counter() - began)

    def blocking() -> None:
        note("blocking", seconds(lambda: guard.save(step=next(steps))))

    # Shuffled: pages that the way before has just freed make a write through the page cache several times as fast.
    ways = [copy, by_hand, behind, blocking, lambda: note_dcp(state, folder / "dcp", stager, note)]
    shuffled = random.Random(runs)
    for _ in range(runs + 1):  # the first round makes every way's memory, and is left out
        for way in shuffled.sample(ways, len(ways)):
            clear(folder)
            os.sync()  # the disk is to come to rest
            way()
    took = {way: values[1:] for way, values in took.items()}
    size = sum(value.nbytes for value in state.values()) / 2**30
    print(f"{size:.2f} GiB in {len(state)} tensors, medians of {runs} runs")
    rows = (
        ("the call", "copy", 1.3),
        ("the call", "DCP async_save, the call", 1.0),
        ("call to sealed", "save_file + fsync", 1.1),
        ("blocking", "save_file + fsync", None),
        ("DCP async_save, the call", "copy", None),
        ("DCP async_save, to durable", "save_file + fsync", None),
    )
    show(took, rows)


def show(took: dict[str, list[float]], rows: Iterable[tuple[str, str, float | None]]) -> None:
    """Print the ratio of one way to another, for each row."""
    for way, base, bar in rows:
        ratio = median_ratio(took[way], took[base])
        own, other = statistics.median(took[way]) * 1e3, statistics.median(took[base]) * 1e3
        wanted = f"   at most {bar}" if bar else ""
        print(f"  {way:32} {ratio:5.2f} x {base:34} ({own:.1f} ms, {other:.1f} ms){wanted}")


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors that a save holds, flat."""
    moments = {f"{n}.{k}": v for n, state in enumerate(optimizer.state.values()) for k, v in state.items()}
    return {**model.state_dict(), **moments}


def note_dcp(
    state: dict[str, torch.Tensor], folder: Path, stager: AsyncStager, note: Callable[[str, float], None]
) -> None:
    """One `async_save`; the stager keeps its memory."""
    began = time.perf_counter()
    response: Any = dcp.async_save(state, checkpoint_id=folder, async_stager=stager, no_dist=True)
    note("DCP async_save, the call", time.perf_counter() - began)
    response.result()
    note("DCP async_save, to durable", time.perf_counter() - began)


def plain(state: dict[str, torch.Tensor], path: Path) -> None:
    """What one would do by hand."""
    save_file(state, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def clear(folder: Path) -> None:
    """Remove what was written."""
    shutil.rmtree(folder / "dcp", ignore_errors=True)
    (folder / "plain.safetensors").unlink(missing_ok=True)
    for path in (folder / "run").glob("step-*"):
        shutil.rmtree(path)


if __name__ == "__main__":
    main()
