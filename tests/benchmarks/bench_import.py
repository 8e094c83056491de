"""How much does ``import ckptguard`` add after torch, compared with importing msgspec?

    python tests/benchmarks/bench_import.py [--runs 20]

Prints medians in milliseconds, each in fresh processes taken in turn, and the third-party modules that came in.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

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


def once(module: str) -> tuple[float, list[str]]:
    """Milliseconds that one import took after torch, and the top-level modules that are not Python's own."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(module=module)], capture_output=True, check=True)
    milliseconds, modules = json.loads(done.stdout)
    return milliseconds, modules


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
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


if __name__ == "__main__":
    main()
