"""What it costs a save to record the numbers of each tensor (largest, rms, zeros) beside its check for NaN.

    python -m benchmarks.bench_numbers [--size-gib 0.5] [--runs 15] [--folder DIR]

CPU seconds of a blocking `TrainingGuard.save` with and without them, in a shuffled order in one process, of the state
of AdamW. Wide layers have tensors of 64 MiB, and those of GPT-2 are as in its smallest form. Of the others there are
1,600 tensors each: medium ones have 256 KiB, narrow ones 16 KiB, and tiny ones 256 bytes.
At most 1.02 is wanted. From 16 KiB to some MiB it is more: the first 64 KiB of a tensor are its sample, and the sum of
their squares in float64 takes 9 us, where all else that a save does with 64 KiB takes about 50 us.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import ckptguard
from benchmarks.bench_save import SIDE, clear
from benchmarks.measuring import median_ratio, options
from ckptguard.scan.result import Numbers
from ckptguard.training.content import safetensors_file
from ckptguard.training.content.tensor_bytes import is_finite

GPT2 = 768
_SIDES = {"medium": 256, "narrow": 64, "tiny": 8}


class OnlyFinite:
    """What a save did without the numbers: a tally that only looks for NaN and infinity."""

    first_bad: int | None = None

    def __init__(self, size: int, dtype: str = "") -> None:
        self.dtype = dtype

    def are_small(self, size: int) -> bool:
        """None is."""
        return False

    def settle(self) -> dict[int, Numbers]:
        """Nothing."""
        return {}

    def tally(self, dtype: str, byte_order: str) -> OnlyFinite:
        """One for a tensor."""
        return OnlyFinite(0, dtype)

    def look(self, block: memoryview) -> None:
        """Look at a block."""
        self.first_bad = self.first_bad if is_finite(block, self.dtype) else 0

    def sample(self, data: memoryview) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class NoNumbers:
    """What a manifest then says."""

    recorded = ()


def layers_of(kind: str, size_gib: float) -> Iterable[nn.Module]:
    """Layers whose state takes about as much."""
    wanted = size_gib * 2**30 / 12
    if kind == "wide":
        return [nn.Linear(SIDE, SIDE, bias=False) for _ in range(max(1, round(wanted / SIDE**2)))]
    if kind in _SIDES:
        return [nn.Linear(_SIDES[kind], _SIDES[kind]) for _ in range(200)]

    def block() -> nn.Module:
        wide = nn.Linear(GPT2, 3 * GPT2), nn.Linear(GPT2, GPT2), nn.Linear(GPT2, 4 * GPT2), nn.Linear(4 * GPT2, GPT2)
        return nn.ModuleList([nn.LayerNorm(GPT2), *wide, nn.LayerNorm(GPT2)])

    return [block() for _ in range(max(1, round(wanted / (12 * GPT2**2))))]


def measure(folder: Path, kind: str, size_gib: float, runs: int) -> None:
    """Print the ratio for one kind of layers."""
    model = nn.ModuleList(layers_of(kind, size_gib))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    guard = ckptguard.TrainingGuard(folder / "run", model=model, optimizer=optimizer, daemon="off")
    steps, took = itertools.count(), {True: list[float](), False: list[float]()}
    plain: Any = {"Tallies": OnlyFinite, "merge": lambda _: NoNumbers}
    shuffled = random.Random(runs)
    for _ in range(runs + 1):  # the first round makes the memory, and is left out
        for records in shuffled.sample([True, False], 2):
            clear(folder)
            with nullcontext() if records else patch.multiple(safetensors_file, **plain):
                began = time.process_time()
                guard.save(step=next(steps))
                took[records].append(time.process_time() - began)
    took = {records: values[1:] for records, values in took.items()}
    ratio = median_ratio(took[True], took[False])
    with_numbers, without = (statistics.median(took[records]) * 1e3 for records in (True, False))
    print(f"  {kind:8} {ratio:.3f} x   ({with_numbers:.1f} ms, {without:.1f} ms of CPU without them)")


def main() -> None:
    """Measure each kind of layers."""
    given = options(__doc__, size_gib=0.5, runs=15, folder=Path)
    warnings.filterwarnings("ignore")
    print(f"CPU of a save that records the numbers, medians of {given.runs} runs")
    for kind in ("wide", "gpt2", *_SIDES):
        with tempfile.TemporaryDirectory(dir=given.folder) as name:
            measure(Path(name), kind, given.size_gib, given.runs)


if __name__ == "__main__":
    main()
