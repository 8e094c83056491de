"""Verification against md5sum and against the naive way, in turns, as whole processes.

    python -m benchmarks.bench_scan [--size-gib 2] [--runs 5] [--folder DIR] [--only PART]

Prints medians of wall time and CPU time as ratios to md5sum over the same files in the same run, and peak memory:
one file in either format, with MD5, with BLAKE3 alone, and bound to one processor; eight shards with md5sum reading
them one after the other; a sparse file four times as large, for its memory. Start and end of the process are in it;
the bytecode is compiled beforehand, as an installer does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from support.tiny_files import safetensors_head

from benchmarks.bench_import import compiled, tiny_file
from benchmarks.measuring import Cost, cost_of, median_ratio, options, warm

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
folder, tensors, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
prefix = name.partition("-of-")[0].removeprefix("model-").partition(".")[0]
state = {f"layer.{prefix}.{i}.weight": torch.randn(4096, 4096) for i in range(tensors)}
save_file(state, f"{folder}/{name}") if name.endswith("safetensors") else torch.save(state, f"{folder}/{name}")
"""

VERIFY = [sys.executable, "-m", "ckptguard", "verify"]
BLAKE3 = [*VERIFY, "--digest", "blake3"]
TENSOR = 4096 * 4096 * 4
SHARDS = 8


def measure(title: str, paths: Sequence[Path], ways: dict[str, list[str]], runs: int, code: int = 0) -> None:
    """Print the ratios of some ways to `md5sum` on the same files."""
    names = [str(path) for path in paths]
    ways = {"md5sum": ["md5sum", *names], **ways}
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as elsewhere:
        environment = compiled(Path(elsewhere))
        for way in (VERIFY, BLAKE3):  # their first start compiles
            cost_of([*way, str(tiny_file(Path(elsewhere) / "tiny.safetensors"))], environment)
        for _ in range(runs):
            for name, argv in ways.items():
                warm(paths)
                costs[name].append(cost_of(argv, environment, (0, code)))
    size = sum(path.stat().st_size for path in paths) / 2**30
    print(f"{title}: {size:.2f} GiB, medians of {runs} runs, ratios to md5sum")
    for name, own in costs.items():
        base = costs["md5sum"]
        wall = median_ratio([c.wall for c in own], [c.wall for c in base])
        cpu = median_ratio([c.cpu for c in own], [c.cpu for c in base])
        seconds = statistics.median(c.wall for c in own)
        peak = max(c.peak_mib for c in own)
        print(f"  {name:24} wall {wall:5.2f} ({seconds:5.2f} s)   CPU {cpu:5.2f}   peak {peak:7.1f} MiB", flush=True)


def one_file(folder: Path, name: str, tensors: int, runs: int) -> None:
    """One file, in every way."""
    path = make(folder, tensors, name)
    ways = {
        "naive": [sys.executable, "-c", NAIVE, str(path)],
        "ckptguard": [*VERIFY, str(path)],
        "ckptguard BLAKE3": [*BLAKE3, str(path)],
        "ckptguard BLAKE3, 1 core": ["taskset", "-c", "0", *BLAKE3, str(path)],
        "ckptguard start": [*VERIFY, str(tiny_file(folder / "start" / "tiny.safetensors"))],
    }
    measure(name, [path], ways, runs)
    path.unlink()


def shards(folder: Path, tensors: int, runs: int) -> None:
    """A checkpoint of eight shards."""
    checkpoint = folder / "model"
    checkpoint.mkdir()
    names = [f"model-{n:05}-of-{SHARDS:05}.safetensors" for n in range(1, SHARDS + 1)]
    paths = [make(checkpoint, max(tensors // 4, 1), name) for name in names]
    index = {f"layer.{n:05}.{i}.weight": name for n, name in enumerate(names, 1) for i in range(max(tensors // 4, 1))}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    ways = {"ckptguard": [*VERIFY, str(checkpoint)], "ckptguard BLAKE3": [*BLAKE3, str(checkpoint)]}
    measure(f"{SHARDS} shards", paths, ways, runs)
    for path in paths:
        path.unlink()


def sparse(folder: Path, tensors: int) -> None:
    """A large file of one tensor that takes no room on the disk; all zero, so its verdict is a question."""
    path, size = folder / "sparse.safetensors", 4 * tensors * TENSOR
    head = safetensors_head({"w": [size // 4]})
    path.write_bytes(head)
    os.truncate(path, len(head) + size)
    os.utime(path, (time.time() - 60, time.time() - 60))
    measure(f"sparse, {size / 2**30:.0f} GiB", [path], {"ckptguard": [*VERIFY, str(path)]}, 1, code=4)
    path.unlink()


def make(folder: Path, tensors: int, name: str) -> Path:
    """A file of so many tensors of 64 MiB, old enough to count as quiet."""
    subprocess.run([sys.executable, "-c", MAKE, str(folder), str(tensors), name], check=True)
    os.utime(folder / name, (time.time() - 60, time.time() - 60))
    return folder / name


def main() -> None:
    """Make the files, measure, remove them."""
    parts = ("safetensors", "torch", "shards", "sparse")
    given = options(__doc__, size_gib=2.0, runs=5, folder=Path, only=(None, *parts))
    tensors = max(1, round(given.size_gib * 2**30 / TENSOR))
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        wanted = parts if given.only is None else (given.only,)
        if "safetensors" in wanted:
            one_file(folder, "model.safetensors", tensors, given.runs)
        if "torch" in wanted:
            one_file(folder, "model.pt", tensors, given.runs)
        if "shards" in wanted:
            shards(folder, tensors, given.runs)
        if "sparse" in wanted:
            sparse(folder, tensors)


if __name__ == "__main__":
    main()
