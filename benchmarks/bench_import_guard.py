"""How much does ``from ckptguard import TrainingGuard`` add after torch, and making the first guard after that?

    python -m benchmarks.bench_import_guard [--runs 20]

Prints medians of processor time in milliseconds, each in fresh processes, and how many modules came in.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

PROGRAM = """
import json, sys, tempfile, time
import torch
model = torch.nn.Linear(2, 2)
counts, times = [len(sys.modules)], [time.process_time()]
from ckptguard import TrainingGuard
counts.append(len(sys.modules)); times.append(time.process_time())
TrainingGuard(tempfile.mkdtemp(), model=model, daemon="off")
counts.append(len(sys.modules)); times.append(time.process_time())
print(json.dumps([(b - a) * 1000 for a, b in zip(times, times[1:])] + [b - a for a, b in zip(counts, counts[1:])]))
"""
BAR = 60.0  # milliseconds for the name


def once() -> list[float]:
    """(ms of the name, ms of the first guard, modules of the name, modules of the first guard)."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    found = [once() for _ in range(parser.parse_args().runs)]
    name, guard, modules, more = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"from ckptguard import TrainingGuard: median {name:6.1f} ms of processor time, {modules:.0f} modules")
    print(f"the first guard after that:          median {guard:6.1f} ms of processor time, {more:.0f} modules more")
    print(f"bar for the name: {BAR:.0f} ms: {'met' if name <= BAR else 'missed'}")


if __name__ == "__main__":
    main()
