"""What does a daemon that verifies a large save cost the training beside it, on the same two processors?

    python -m benchmarks.bench_beside [--size-gib 2] [--rounds 3] [--step-ms 10] [--rate BYTES] [--folder DIR]
    python -m benchmarks.bench_beside --copies [--every 60]

A training loop (torch on the processors, as many threads) makes steps of about so many milliseconds. In each round,
in a shuffled order, a checkpoint of that size arrives in the run (a rename, its bytes in the page cache as after any
save) while: a daemon verifies it with the default limits (it stands back: nice, SCHED_BATCH, last in line for the
disk), and with `--rate` the same held to so many bytes a second. Before
and after each, steps without a daemon. Printed for each kind, medians over the rounds: the median step, the
95th percentile and the steps per second between arrival and verdict, as ratios to those without a daemon; and the
time from arrival to verdict.

With `--copies`: what the kept copy's own bytes cost where such a save arrives every so many seconds. The kinds are
then `keep = "link"` and `keep = "auto"`, and the steps of the whole time between two saves count.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.measuring import daemon, options, seconds, write_tensors

PATIENCE = 600.0
CHUNK = 64 << 20


class Phase(NamedTuple):
    """The seconds that each step took, and those until the verdict."""

    steps: list[float]
    verdict: float


def training(step_seconds: float) -> Callable[[], None]:
    """A step of about so long: a model with AdamW, as wide as that takes."""
    width = 256
    while True:
        model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in "1234")
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batch = torch.randn(64, width)

        def step(model=model, optimizer=optimizer, batch=batch) -> None:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        times = timed(step, 30)[10:]
        if percentile(times, 0.25) >= 0.8 * step_seconds:
            return step
        width = width * 5 // 4


def timed(step: Callable[[], None], count: int) -> list[float]:
    """The seconds of each of so many steps."""
    return [seconds(step) for _ in range(count)]


def write_checkpoint(path: Path, size: int) -> None:
    """A safetensors file of about this size, of ordinary numbers, on disk and in the page cache."""
    block = torch.randn(CHUNK // 4).numpy().tobytes()
    count = max(1, size // CHUNK)
    write_tensors(path, {f"w{i}": [CHUNK // 4] for i in range(count)}, (block for _ in range(count)))


def beside(step: Callable[[], None], folder: Path, size: int, settings: dict[str, object], every: float = 0.0) -> Phase:
    """The steps while a daemon verifies what arrives, and nothing else goes on; for `every` seconds at least."""
    run = folder / "run"
    run.mkdir()
    try:
        write_checkpoint(folder / "net-1.safetensors", size)
        with daemon(folder, run, settle=0.05, **settings) as guarding:
            guarding.logged("guarding")
            timed(step, 20)
            saved = (folder / "net-1.safetensors").rename(run / "net-1.safetensors")
            began, found = time.perf_counter(), []
            while not (verdict := sorted(run.glob("_ckptguard/ledger/*/*.json"))):
                found += timed(step, 1)
                if time.perf_counter() - began > PATIENCE:
                    raise SystemExit("there is no verdict")
            judged = time.perf_counter() - began
            while time.perf_counter() - began < every or (
                settings.get("keep") == "auto" and os.stat(saved).st_nlink > 1
            ):
                found += timed(step, 1)
                if time.perf_counter() - began > PATIENCE:
                    raise SystemExit("the kept copy has no bytes of its own")
            if settings.get("keep") == "link" and os.stat(saved).st_nlink == 1:
                raise SystemExit("there is no kept copy by a link")
        if not verdict[0].name.endswith(".good.json"):
            raise SystemExit(f"a good checkpoint was called otherwise: {verdict[0].name}")
        return Phase(found, judged)
    finally:
        shutil.rmtree(run)


def percentile(values: list[float], share: float) -> float:
    """The value below which that share of them lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Measure and print."""
    given = options(__doc__, size_gib=2.0, rounds=3, step_ms=10.0, rate=float, copies=False, every=60.0, folder=Path)
    processors = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, processors)  # the daemon inherits it
    torch.set_num_threads(len(processors))
    kinds: dict[str, dict[str, object]] = {"default limits": {}}
    if given.rate:
        kinds[f"at {given.rate / 1e6:g} MB/s"] = {"verify_rate": given.rate}
    if given.copies:
        kinds = {"by links": {"keep": "link"}, "with copies": {"keep": "auto"}}
    every = given.every if given.copies else 0.0
    step, size = training(given.step_ms / 1e3), int(given.size_gib * 2**30)
    ratios: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in kinds}
    alone: list[float] = []
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        for _ in range(given.rounds):
            for kind in random.sample(list(kinds), len(kinds)):
                before = timed(step, 100)
                phase = beside(step, Path(name), size, kinds[kind], every)
                plain = before + timed(step, max(100, len(phase.steps)))
                alone += plain
                ratios[kind].append(
                    (
                        statistics.median(phase.steps) / statistics.median(plain),
                        percentile(phase.steps, 0.95) / percentile(plain, 0.95),
                        (len(phase.steps) / sum(phase.steps)) / (len(plain) / sum(plain)),
                        phase.verdict,
                    )
                )
    print(f"{len(processors)} processors, {size / 2**30:g} GiB, a step alone {statistics.median(alone) * 1e3:.1f} ms")
    print(f"{'':16}{'median step':>14}{'95th':>8}{'steps/s':>10}{'verdict':>12}")
    for kind, found in ratios.items():
        median, high, speed, judged = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{kind:16}{median:>13.2f}x{high:>7.2f}x{speed:>9.2f}x{judged:>10.2f} s")


if __name__ == "__main__":
    main()
