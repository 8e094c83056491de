"""What does the record of the curve cost a guarded training?

    python -m benchmarks.bench_curve [--updates 40000] [--pairs 7] [--step 0.0]

Pairs of trainings, taken in turn, in which an update itself takes `step` seconds: the same `steps` and `observe` with
the record and without it, saves left out. The record is written every second, thirty times as often as it is. What
counts is the ratio of updates per second; the processor time of the whole process is printed, too, because the thread
that writes takes its own.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time

import torch

import ckptguard
from benchmarks.measuring import options
from ckptguard.training.signals import curve_recorder


def train(folder: str, updates: int, step: float, *, records: bool) -> tuple[float, float]:
    """(updates per second, processor seconds) of one training."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = ckptguard.TrainingGuard(folder, model=model, optimizer=optimizer, daemon="off")
    if not records:
        guard._monitor.recent.curve = curve_recorder.CurveRecorder(None)
    begin = used = 0.0
    for number, _ in guard.steps(range(updates + 2), total=updates + 1, save_every=10**9):
        if number == 1:  # the first save is over
            begin, used = time.perf_counter(), time.process_time()
        until = time.perf_counter() + step
        while time.perf_counter() < until:
            pass
        guard.observe(loss=2.0 + number % 7, grad_norm=1.0 + number % 3)
        if number == updates:
            break
    took = time.perf_counter() - begin, time.process_time() - used
    guard.close()
    return updates / took[0], took[1]


def main() -> None:
    """Measure and print."""
    logging.disable(logging.CRITICAL)
    given = options(__doc__, updates=40_000, pairs=7, step=0.0)
    torch.set_num_threads(1)
    curve_recorder._PAUSE = 1.0
    rates, processor = [], []
    for _ in range(given.pairs):
        found = {}
        for records in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                found[records] = train(folder, given.updates, given.step, records=records)
        rates.append(found[True][0] / found[False][0])
        processor.append((found[True][1] - found[False][1]) / given.updates * 1e6)
    print(
        f"updates a second with the record, against without: x {statistics.median(rates):.3f} "
        f"({min(rates):.3f} to {max(rates):.3f}, {given.pairs} pairs of {given.updates:,} updates of "
        f"{given.step * 1e3:g} ms); processor time {statistics.median(processor):+.1f} us an update"
    )


if __name__ == "__main__":
    main()
