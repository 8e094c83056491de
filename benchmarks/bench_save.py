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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

import ckptguard
from benchmarks.measuring import median_ratio, options, seconds

SIDE = 4096


def training(size_gib: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with AdamW whose state takes this much, a third of it weights."""
    layers = max(1, round(size_gib * 2**30 / (3 * SIDE * SIDE * 4)))
    model = torch.nn.Sequential(*[torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)])
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
    moments = {
        f"{number}.{key}": value
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }
    state = {**model.state_dict(), **moments}
    room = {key: torch.zeros_like(value) for key, value in state.items()}
    run = folder / "run"
    guard = ckptguard.TrainingGuard(run, model=model, optimizer=optimizer, daemon="off")
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
            clear(folder, run)
            way()
    took = {way: values[1:] for way, values in took.items()}
    size = sum(value.nbytes for value in state.values()) / 2**30
    print(f"{size:.2f} GiB in {len(state)} tensors, medians of {runs} runs")
    for way, base, bar in (
        ("the call", "copy", 1.3),
        ("the call", "DCP async_save, the call", 1.0),
        ("call to sealed", "save_file + fsync", 1.1),
        ("blocking", "save_file + fsync", None),
        ("DCP async_save, the call", "copy", None),
        ("DCP async_save, to durable", "save_file + fsync", None),
    ):
        ratio = median_ratio(took[way], took[base])
        own, other = statistics.median(took[way]), statistics.median(took[base])
        wanted = f"   at most {bar}" if bar else ""
        print(f"  {way:28} {ratio:5.2f} x {base:26} ({own:.2f} s, {other:.2f} s){wanted}")


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


def clear(folder: Path, run: Path) -> None:
    """Remove what was written, and let the disk come to rest."""
    shutil.rmtree(folder / "dcp", ignore_errors=True)
    (folder / "plain.safetensors").unlink(missing_ok=True)
    for path in run.glob("step-*"):
        shutil.rmtree(path)
    os.sync()


if __name__ == "__main__":
    main()
