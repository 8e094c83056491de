"""How long starting takes: commands against ``import click``, ``import ckptguard`` after torch against msgspec.

    python -m benchmarks.bench_import [--runs 20] [--only commands|library]

Prints medians over fresh processes taken in turn, and what the commands may take. The bytecode of everything is
compiled beforehand, as an installer does, whatever ``PYTHONDONTWRITEBYTECODE`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def cost_of(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Seconds on the clock and of processors that a process takes, which must end well."""
    started = time.perf_counter()
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{argv} ended with {process.returncode}")
    return wall, usage.ru_utime + usage.ru_stime


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
        costs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(runs + 1):
            for way, argv in ways.items():
                costs[way].append(cost_of(argv, environment))
    print(f"starts, medians of {runs} runs, ratios to `import click`")
    for way, own in costs.items():
        pairs = list(zip(own[1:], costs["click"][1:], strict=True))
        wall, cpu = (statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1))
        least = min(cost[0] for cost in own[1:]) * 1000
        bar = f"   at most {BARS[way]}" if way in BARS else ""
        print(f"  {way:15} wall {wall:5.2f} (at best {least:4.0f} ms)   CPU {cpu:5.2f}{bar}")


def once(module: str) -> tuple[float, list[str]]:
    """Milliseconds that one import took after torch, and the top-level modules that are not Python's own."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(module=module)], capture_output=True, check=True)
    milliseconds, modules = json.loads(done.stdout)
    return milliseconds, modules


def library(runs: int) -> None:
    """What ``import ckptguard`` adds after torch, beside what msgspec would."""
    taken: dict[str, list[float]] = {"msgspec": [], "ckptguard": []}
    for _ in range(runs):
        for module, values in taken.items():
            milliseconds, modules = once(module)
            values.append(milliseconds)
            if module == "ckptguard":
                found = modules
    for module, values in taken.items():
        print(f"import {module:9} after torch: median {statistics.median(values):6.2f} ms")
    difference = statistics.median(taken["ckptguard"]) - statistics.median(taken["msgspec"])
    print(f"ckptguard - msgspec: {difference:+.2f} ms (bar: at most +5)")
    print(f"third-party modules of import ckptguard: {[m for m in found if m != 'ckptguard'] or 'none'}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", choices=("commands", "library"), help="measure one part only")
    options = parser.parse_args()
    for part, measured in (("commands", commands), ("library", library)):
        if options.only in (None, part):
            measured(options.runs)


if __name__ == "__main__":
    main()
