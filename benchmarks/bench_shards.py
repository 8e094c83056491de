"""One large checkpoint, on the workers of a Dask cluster and in one process.

    python -m benchmarks.bench_shards [--shards 8] [--megabytes 512] [--workers 4]

It writes a checkpoint of safetensors shards with an index, as transformers does. It verifies it with
`ckptguard verify`, and with `ckptguard fleet verify --engine dask://...` on a local cluster. It prints which worker
scanned which shard, compares the manifests and the verdicts, and prints what each took. On one
machine the workers share its processors, so they gain nothing there: several machines do.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from servers.processes import free_port, listens, running

from benchmarks.measuring import options, write_tensors
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import open_run
from ckptguard.runs.history import load_history
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Verdict

_LAYERS = 16  # a shard


def write(run: Path, shards: int, megabytes: int) -> None:
    """A checkpoint of random numbers."""
    folder = run / "checkpoint-100"
    folder.mkdir(parents=True)
    numbers, places = np.random.default_rng(1), dict[str, str]()
    size = (megabytes << 20) // _LAYERS // 4
    for shard in range(1, shards + 1):
        name = f"model-{shard:05}-of-{shards:05}.safetensors"
        tensors = [f"model.layers.{shard * _LAYERS + n}.weight" for n in range(_LAYERS)]
        places |= dict.fromkeys(tensors, name)
        blocks = (numbers.standard_normal(size, dtype=np.float32).tobytes() for _ in tensors)
        write_tensors(folder / name, {tensor: [size] for tensor in tensors}, blocks)
    index = {"metadata": {"total_size": shards * _LAYERS * size * 4}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def processor_seconds() -> float:
    """What processes that have ended took of the processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def verified(run: Path, *words: str) -> tuple[float, Manifest, Verdict]:
    """Verify a run without records by a command: seconds, and what is on record then."""
    shutil.rmtree(run / "_ckptguard", ignore_errors=True)
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "ckptguard", *words], capture_output=True, text=True)
    took = time.perf_counter() - began
    assert done.returncode == 0, done.stdout + done.stderr
    opened = open_run(str(run))
    assert [len(names) for names in load_history(opened).names.values()] == [1]
    [series] = load_history(opened).names
    history = load_history(opened)
    [id] = history.current_verdicts(series)
    manifest, verdict = read_manifest(opened, id), history.verdict(id)
    assert manifest is not None
    assert verdict is not None
    return took, manifest, verdict


def on_dask(fleet: Path, workers: int, folder: Path) -> tuple[float, Manifest, Verdict]:
    """The same on a cluster; prints who did what."""
    notes = folder / "notes"
    notes.mkdir()
    port, tests = free_port(), Path(__file__).resolve().parents[1] / "tests"
    path = os.pathsep.join((str(tests), os.environ.get("PYTHONPATH", "")))
    how = {"env": {**os.environ, "NOTING_NOTES": str(notes), "PYTHONPATH": path}, "cwd": folder}
    dask, place = [sys.executable, "-m"], f"tcp://127.0.0.1:{port}"
    scheduler = [*dask, "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    several = ["--nworkers", str(workers), "--nthreads", "1", "--preload", "support.noting_workers", "--no-dashboard"]
    with (
        running(scheduler, folder / "scheduler.log", lambda: listens(port), **how),
        running([*dask, "distributed.cli.dask_worker", place, *several], folder / "workers.log", lambda: True, **how),
    ):
        while (folder / "workers.log").read_text().count("Starting established connection") < workers:
            time.sleep(0.1)
        result = verified(fleet / "run", "fleet", "verify", str(fleet), "--engine", f"dask://127.0.0.1:{port}")
    for number, worker in enumerate(sorted(notes.iterdir()), 1):
        print(f"worker {number}:")
        for line in worker.read_text().splitlines():
            verb, seconds, *files = line.split()
            print(f"  {' '.join([verb, *files])}: {seconds} s")
    return result


def main() -> None:
    """Print the figures."""
    given = options(__doc__, shards=8, megabytes=512, workers=4)
    with tempfile.TemporaryDirectory() as place:
        folder, fleet = Path(place), Path(place, "fleet")
        write(fleet / "run", given.shards, given.megabytes)
        used = [processor_seconds()]
        one, manifest, verdict = verified(fleet / "run", "verify", str(fleet / "run"), "--workers", "1")
        used.append(processor_seconds())
        own, same, again = verified(fleet / "run", "verify", str(fleet / "run"))
        used.append(processor_seconds())
        many, joined, found = on_dask(fleet, given.workers, folder)
        used.append(processor_seconds())
    assert manifest.files == same.files == joined.files
    assert (verdict.outcome, verdict.findings) == (again.outcome, again.findings) == (found.outcome, found.findings)
    assert (verdict.facts, verdict.digests) == (found.facts, found.digests)
    gigabytes = given.shards * given.megabytes / 1024
    print(f"{given.shards} shards, {gigabytes:g} GiB; the manifests and the verdicts are equal ({found.outcome})")
    names = ("verify with 1 worker", "verify", f"{given.workers} Dask workers")
    for name, wall, before, after in zip(names, (one, own, many), used, used[1:], strict=False):
        print(f"{name}: {wall:.1f} s, {after - before:.1f} s of the processors")


if __name__ == "__main__":
    main()
