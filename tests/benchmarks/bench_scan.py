"""Verification against md5sum and against the naive way, in turns, as whole processes.

    python tests/benchmarks/bench_scan.py [--size-gib 2] [--runs 5] [--folder DIR]

Prints medians of wall time and CPU time as ratios to md5sum on the same file in the same run, and peak memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

NAIVE = """
import subprocess, sys, torch
path = sys.argv[1]
subprocess.run(["md5sum", path], check=True, stdout=subprocess.DEVNULL)
if path.endswith(".safetensors"):
    from safetensors.torch import load_file
    state = load_file(path)
else:
    state = torch.load(path, weights_only=True)
assert all(torch.isfinite(t).all() for t in state.values())
"""

MAKE = """
import sys, torch
from safetensors.torch import save_file
folder, tensors = sys.argv[1], int(sys.argv[2])
state = {f"layer.{i}.weight": torch.randn(4096, 4096) for i in range(tensors)}
save_file(state, f"{folder}/model.safetensors")
torch.save(state, f"{folder}/model.pt")
"""


class Cost(NamedTuple):
    """What one process cost, its children included."""

    wall: float
    cpu: float
    peak_mib: float


def run(argv: list[str]) -> Cost:
    """Run a command to its end and say what it cost; it must succeed."""
    started = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{argv} ended with {process.returncode}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def measure(path: Path, runs: int) -> None:
    """Print the ratios for one file."""
    ways = {
        "md5sum": ["md5sum", str(path)],
        "naive": [sys.executable, "-c", NAIVE, str(path)],
        "ckptguard verify": [sys.executable, "-m", "ckptguard", "verify", str(path)],
    }
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    run(ways["md5sum"])  # warms the page cache
    for _ in range(runs):
        for name, argv in ways.items():
            costs[name].append(run(argv))
    print(f"{path.name}: {path.stat().st_size / 2**30:.2f} GiB, medians of {runs} runs, ratios to md5sum")
    for name, own in costs.items():
        pairs = list(zip(own, costs["md5sum"], strict=True))
        wall = statistics.median(c.wall / base.wall for c, base in pairs)
        cpu = statistics.median(c.cpu / base.cpu for c, base in pairs)
        seconds = statistics.median(c.wall for c in own)
        peak = max(c.peak_mib for c in own)
        print(f"  {name:18} wall {wall:5.2f} ({seconds:5.2f} s)   CPU {cpu:5.2f}   peak {peak:7.1f} MiB")


def main() -> None:
    """Make the files, measure, remove them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size-gib", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to make the files (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        subprocess.run([sys.executable, "-c", MAKE, folder, str(max(1, round(options.size_gib * 16)))], check=True)
        for name in ("model.safetensors", "model.pt"):
            measure(Path(folder) / name, options.runs)


if __name__ == "__main__":
    main()
