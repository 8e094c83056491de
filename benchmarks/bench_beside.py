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

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

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
    found = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        found.append(time.perf_counter() - began)
    return found


def write_checkpoint(path: Path, size: int) -> None:
    """A safetensors file of about this size, of ordinary numbers, on disk and in the page cache."""
    block = torch.randn(CHUNK // 4).numpy().tobytes()
    count = max(1, size // CHUNK)
    header = {
        f"w{i}": {"dtype": "F32", "shape": [CHUNK // 4], "data_offsets": [i * CHUNK, (i + 1) * CHUNK]}
        for i in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def daemon(run: Path, settings: str) -> Iterator[None]:
    """A daemon that guards the run."""
    config, log = run.with_suffix(".toml"), run.with_suffix(".log")
    config.write_text(f"settle = 0.05\n{settings}\n")
    command = [sys.executable, "-m", "ckptguard_daemon", str(run), "--config", str(config), "--log-file", str(log)]
    process = subprocess.Popen([*command, "--socket", str(run.with_suffix(".sock"))])
    try:
        deadline = time.monotonic() + PATIENCE
        while not (log.exists() and "guarding" in log.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the daemon does not start")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def beside(step: Callable[[], None], folder: Path, size: int, settings: str, every: float = 0.0) -> Phase:
    """The steps while a daemon verifies what arrives, and nothing else goes on; for `every` seconds at least."""
    run = folder / "run"
    run.mkdir()
    try:
        write_checkpoint(folder / "net-1.safetensors", size)
        with daemon(run, settings):
            timed(step, 20)
            saved = (folder / "net-1.safetensors").rename(run / "net-1.safetensors")
            began, found = time.perf_counter(), []
            while not (verdict := sorted(run.glob("_ckptguard/ledger/*/*.json"))):
                found += timed(step, 1)
                if time.perf_counter() - began > PATIENCE:
                    raise SystemExit("there is no verdict")
            seconds = time.perf_counter() - began
            while time.perf_counter() - began < every or ("auto" in settings and os.stat(saved).st_nlink > 1):
                found += timed(step, 1)
                if time.perf_counter() - began > PATIENCE:
                    raise SystemExit("the kept copy has no bytes of its own")
            if "link" in settings and os.stat(saved).st_nlink == 1:
                raise SystemExit("there is no kept copy by a link")
        if not verdict[0].name.endswith(".good.json"):
            raise SystemExit(f"a good checkpoint was called otherwise: {verdict[0].name}")
        return Phase(found, seconds)
    finally:
        shutil.rmtree(run)


def percentile(values: list[float], share: float) -> float:
    """The value below which that share of them lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rate", type=float, help="bytes a second: measure with this limit too")
    parser.add_argument("--copies", action="store_true", help="measure what the kept copies' own bytes cost")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two saves, with --copies")
    parser.add_argument("--folder", help="where the run is made; default: a temporary folder")
    options = parser.parse_args()
    processors = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, processors)  # the daemon inherits it
    torch.set_num_threads(len(processors))
    kinds = {"default limits": ""}
    if options.rate:
        kinds[f"at {options.rate / 1e6:g} MB/s"] = f"verify_rate = {options.rate!r}"
    if options.copies:
        kinds = {"by links": 'keep = "link"', "with copies": 'keep = "auto"'}
    every = options.every if options.copies else 0.0
    step, size = training(options.step_ms / 1e3), int(options.size_gib * 2**30)
    ratios: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in kinds}
    alone: list[float] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for _ in range(options.rounds):
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
        median, high, speed, seconds = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{kind:16}{median:>13.2f}x{high:>7.2f}x{speed:>9.2f}x{seconds:>10.2f} s")


if __name__ == "__main__":
    main()
