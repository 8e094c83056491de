"""How long starting takes: commands against ``import click``, ``import ckptguard`` after torch against msgspec, and
``from ckptguard import TrainingGuard`` and the first guard after torch.

    python -m benchmarks.bench_import [--runs 20] [--only commands|library|guard]

Prints medians over fresh processes taken in turn, and what the commands and the name may take. The bytecode of
everything is compiled beforehand, as an installer does, whatever ``PYTHONDONTWRITEBYTECODE`` says.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measuring import Cost, cost_of, options
from ckptguard.values.settings import Settings
from ckptguard.verification.target import verify_target

PROGRAM = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import {module}
took = time.perf_counter() - start
new = {{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)
print(json.dumps([took * 1000, sorted(new)]))
"""
GUARD = """
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
NAME_BAR = 60.0  # milliseconds of processor time
COMMAND = [sys.executable, "-m", "ckptguard"]
TINY = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
BARS = {"--version": 1.3, "known-good RUN": 2.0, "verify FILE": 3.0}  # times ``python -c "import click"``


def compiled(folder: Path) -> dict[str, str]:
    """An environment whose processes find compiled bytecode from their second start on."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def tiny_file(path: Path) -> Path:
    """A whole safetensors file of four numbers, old enough to count as quiet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(TINY).to_bytes(8, "little") + TINY + bytes(range(60, 76)))
    os.utime(path, (time.time() - 60, time.time() - 60))
    return path


def commands(runs: int) -> None:
    """The start of commands, as ratios to that of click, whose wall and processor times are taken in the same turn."""
    with tempfile.TemporaryDirectory() as name:
        folder, environment = Path(name), compiled(Path(name))
        tiny_file(folder / "run" / "step-1" / "model.safetensors")
        verify_target(str(folder / "run"), Settings(settle=0.0))
        ways = {
            "click": [sys.executable, "-c", "import click"],
            "--version": [*COMMAND, "--version"],
            "known-good RUN": [*COMMAND, "known-good", str(folder / "run")],
            "verify FILE": [*COMMAND, "verify", str(tiny_file(folder / "tiny.safetensors"))],
        }
        costs: dict[str, list[Cost]] = {way: [] for way in ways}
        for _ in range(runs + 1):
            for way, argv in ways.items():
                costs[way].append(cost_of(argv, environment))
    print(f"starts, medians of {runs} runs, ratios to `import click`")
    for way, own in costs.items():
        pairs = list(zip(own[1:], costs["click"][1:], strict=True))
        wall, cpu = (statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1))
        least = min(cost.wall for cost in own[1:]) * 1000
        bar = f"   at most {BARS[way]}" if way in BARS else ""
        print(f"  {way:15} wall {wall:5.2f} (at best {least:4.0f} ms)   CPU {cpu:5.2f}{bar}")


def printed(program: str) -> Any:
    """What a program of its own says."""
    return json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)


def library(runs: int) -> None:
    """What ``import ckptguard`` adds after torch, beside what msgspec would."""
    taken: dict[str, list[float]] = {"msgspec": [], "ckptguard": []}
    for _ in range(runs):
        for module, values in taken.items():
            milliseconds, modules = printed(PROGRAM.format(module=module))
            values.append(milliseconds)
            if module == "ckptguard":
                found = modules
    for module, values in taken.items():
        print(f"import {module:9} after torch: median {statistics.median(values):6.2f} ms")
    difference = statistics.median(taken["ckptguard"]) - statistics.median(taken["msgspec"])
    print(f"ckptguard - msgspec: {difference:+.2f} ms (bar: at most +5)")
    print(f"third-party modules of import ckptguard: {[m for m in found if m != 'ckptguard'] or 'none'}")


def guard(runs: int) -> None:
    """What the name of the guard adds after torch, and the first guard after that."""
    found = [printed(GUARD) for _ in range(runs)]
    name, first, modules, more = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"from ckptguard import TrainingGuard: median {name:6.1f} ms of processor time, {modules:.0f} modules")
    print(f"the first guard after that:          median {first:6.1f} ms of processor time, {more:.0f} modules more")
    print(f"bar for the name: {NAME_BAR:.0f} ms: {'met' if name <= NAME_BAR else 'missed'}")


def main() -> None:
    """Measure and print."""
    given = options(__doc__, runs=20, only=(None, "commands", "library", "guard"))
    for part, measured in (("commands", commands), ("library", library), ("guard", guard)):
        if given.only in (None, part):
            measured(given.runs)


if __name__ == "__main__":
    main()
