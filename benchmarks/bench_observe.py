"""What does watching cost a training step, looks at the weights included?

    python -m benchmarks.bench_observe [--steps 200] [--pairs 9] [--parameters 1000000] [--threads 1]

First the host time of one `observe` with floats: the cheapest block of calls, and the median one. Then pairs of runs,
taken in turn, of steps that take 10 ms each: a plain loop over the loader, and the same loop through `guard.steps` with
`observe`, a model with AdamW, and a look at weights and moments every 50 steps. What counts is the processor time
between the steps, for on a shared machine the wall clock also counts others; both are printed. Saves are not in it
(bench_save.py). Torch has one thread: on a busy machine several wait for each other. With an accelerator the numbers
lie on it, and any wait for it is an error.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time

import torch

import ckptguard
from benchmarks.measuring import options, seconds
from ckptguard.values.settings import Settings

STEP = 0.010
BLOCK = 500


def build(parameters: int, device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of about so many parameters, with moments."""
    width = max(8, int((parameters / 8) ** 0.5))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.randn(4, width, device=device)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def guard_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str, **options: object) -> object:
    """A guard without a daemon."""
    return ckptguard.TrainingGuard(
        folder, model=model, optimizer=optimizer, daemon="off", settings=Settings(), **options
    )


def observe_cost(guard: object, blocks: int = 60) -> tuple[float, float]:
    """(cheapest, median) microseconds of one call."""
    found = []
    for block in range(blocks):
        start = time.perf_counter()
        for number in range(BLOCK):
            guard.observe(loss=2.0 + 0.001 * (number % 7), grad_norm=1.0 + 0.01 * (block % 3))
        found.append((time.perf_counter() - start) / BLOCK * 1e6)
    return min(found), statistics.median(found)


def spin(until: float) -> None:
    """A training step: it keeps the processor until a moment."""
    while time.perf_counter() < until:
        pass


class Between:
    """The time that is spent between steps: wall clock and processor."""

    def __init__(self) -> None:
        self.wall = 0.0
        self.each: list[float] = []
        self._left: tuple[float, float] | None = None

    @property
    def processor(self) -> float:
        """All of it."""
        return sum(self.each)

    def step(self) -> None:
        """One training step."""
        if self._left is not None:
            self.wall += time.perf_counter() - self._left[0]
            self.each.append(time.process_time() - self._left[1])
        spin(time.perf_counter() + STEP)
        self._left = (time.perf_counter(), time.process_time())


def plain(batches: list[int], steps: int) -> Between:
    """A plain loop."""
    between = Between()
    for _ in batches[:steps]:
        between.step()
    return between


def guarded(guard: object, batches: list[int], steps: int, device: str) -> Between:
    """The same through the guard; the first save is made before the first step, and there is none after the last."""
    loss, norm = torch.tensor(2.0, device=device), torch.tensor(1.0, device=device)
    number, gradient = (2.0, 1.0) if device == "cpu" else (loss, norm)
    between = Between()
    for step, _ in guard.steps(batches, total=steps + 1, save_every=10**9):
        if step == 1 and device != "cpu":  # the first save may wait
            torch.cuda.set_sync_debug_mode("error")
        between.step()
        guard.observe(loss=number, grad_norm=gradient)
        if step == steps:
            break
    if device != "cpu":
        torch.cuda.set_sync_debug_mode("default")
    return between


def main() -> None:
    """Measure and print."""
    logging.disable(logging.CRITICAL)
    given = options(__doc__, steps=200, pairs=9, parameters=1_000_000, threads=1)
    torch.set_num_threads(given.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, optimizer = build(given.parameters, device)
    batches = list(range(given.steps + 2))
    with tempfile.TemporaryDirectory() as folder:
        for name, more in (
            ("floats", {}),
            ("floats, spikes on", {"policy": ckptguard.RollbackPolicy(spikes=ckptguard.Spikes())}),
        ):
            with guard_of(model, optimizer, f"{folder}/{len(name)}", **more) as guard:
                best, median = observe_cost(guard)
            print(f"observe, {name:18}: cheapest {best:5.1f} us, median {median:5.1f} us (bar: under 20)")
        with guard_of(model, optimizer, f"{folder}/looks") as guard:
            looks = [seconds(lambda step=step: guard._monitor.look(step)) for step in range(1, 8)]
        print(f"one look at {given.parameters:,} parameters and their moments: {min(looks) * 1e3:.2f} ms")
        processor, wall, typical = [], [], []
        for pair in range(given.pairs):
            with guard_of(model, optimizer, f"{folder}/pair{pair}") as guard:
                watched = guarded(guard, batches, given.steps, device)
            bare = plain(batches, given.steps)
            processor.append((watched.processor - bare.processor) / (given.steps * STEP))
            typical.append(statistics.median(watched.each) - statistics.median(bare.each))
            wall.append((watched.wall - bare.wall) / (given.steps * STEP))
        print(
            f"steps + observe on a {STEP * 1e3:.0f} ms step: +{statistics.median(processor):.2%} of processor time "
            f"({given.pairs} pairs: {min(processor):.2%} to {max(processor):.2%}), "
            f"+{statistics.median(wall):.2%} of wall clock (bar: under 1 %)"
        )
        per_step = statistics.median(typical) + min(looks) / 50
        print(
            f"the median step between two looks: {statistics.median(typical) * 1e6:.0f} us; with its share of a look "
            f"+{per_step / STEP:.2%} of a step"
        )


if __name__ == "__main__":
    main()
