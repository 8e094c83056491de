"""What bulk work on a fleet costs: measured on this machine, and worked out for a large fleet.

    python -m benchmarks.bench_bulk [--saves 5] [--megabytes 16] [--runs 1000]

Measured: requests and bytes of one verdict, as the storage sees them, and how much faster several processes are than
one. Worked out: how long 1,000 runs with 1 PB take with so many workers, when each series is read in its own order.
The docs quote these figures.
"""

from __future__ import annotations

import heapq
import random
import shutil
import struct
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from unittest import mock

from support.counting_storage import CountingStorage
from support.fleets import done_by, plan_of

import ckptguard.records.run
from benchmarks.measuring import options, write_tensors
from ckptguard.bulk.engine import open_engine
from ckptguard.decisions.bulk_order import SLOWEST, BulkJob, BulkQueue
from ckptguard.storage import open_storage

PETABYTE, SAVES = 10**15, 100


def write(root: Path, runs: int, saves: int, megabytes: int) -> None:
    """Checkpoints of random bytes."""
    size = megabytes << 20
    for run in range(runs):
        for save in range(saves):
            folder = root / f"run{run}" / f"model-{save + 1}"
            folder.mkdir(parents=True)
            numbers = struct.pack("<I", 0x3F800000 + run * saves + save) * (size // 4)
            write_tensors(folder / "model.safetensors", {"w": [size // 4]}, [numbers])


def requests(root: Path) -> Counter[str]:
    """What is asked for one verdict."""
    asked: Counter[str] = Counter()

    def opened(*arguments: object, **how: object) -> object:
        return CountingStorage(open_storage(*arguments, **how), "asked", asked)  # type: ignore[arg-type]

    with open_engine("threads", 1) as engine:
        plan = plan_of(engine, root)
        with mock.patch.object(ckptguard.records.run, "open_storage", opened):
            done_by(engine, plan)
    return Counter({verb: count // len(plan.tasks) for verb, count in asked.items()})


def seconds(root: Path, workers: int) -> float:
    """How long so many processes take that have worked before."""
    with open_engine("processes", workers) as engine:
        for _ in range(2):
            for records in root.glob("*/_ckptguard"):
                shutil.rmtree(records)
            plan = plan_of(engine, root)
            began = time.perf_counter()
            done = done_by(engine, plan)
            assert done.outcomes == {"good": len(plan.tasks)}
    return time.perf_counter() - began


def worked_out(workers: int, shards: int, runs: int) -> float:
    """How many seconds a petabyte takes: runs of very different sizes, each with one series."""
    numbers = random.Random(1)
    weights = [numbers.lognormvariate(0, 1) for _ in range(runs)]
    jobs = []
    for run, weight in enumerate(weights):
        size = int(PETABYTE * weight / sum(weights) / SAVES)
        jobs += [BulkJob(number=run * SAVES + n, chain=str(run), bytes=size) for n in range(SAVES)]
    waiting, parts = BulkQueue(jobs), deque[BulkJob]()
    left: Counter[int] = Counter()
    ends: list[tuple[float, int, BulkJob]] = []
    now = 0.0
    while True:
        while len(ends) < workers:
            if not parts and (job := waiting.take()) is not None:
                left[job.number] = shards
                parts += [job] * shards
            if not parts:
                break
            job = parts.popleft()
            heapq.heappush(ends, (now + job.bytes / shards / SLOWEST, job.number, job))
        if not ends:
            return now
        now, number, job = heapq.heappop(ends)
        left[number] -= 1
        if not left[number]:
            waiting.free(job)


def main() -> None:
    """Print the figures."""
    given = options(__doc__, saves=5, megabytes=16, runs=1000)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "fleet")
        write(root, 4, given.saves, given.megabytes)
        asked = requests(root)
        print(f"one verdict: {asked.total()} requests ({', '.join(f'{n} {v[6:]}' for v, n in asked.most_common())})")
        alone, four = seconds(root, 1), seconds(root, 4)
        print(f"{4 * given.saves} checkpoints of {given.megabytes} MiB: {alone / four:.2f} times as fast with 4")
    for workers in (33, 100, 1000):
        days = [worked_out(workers, shards, given.runs) / 86400 for shards in (1, 8)]
        of = f"1 PB, {given.runs:,} runs, {workers} workers at 50 MB/s"
        print(f"{of}: {days[0]:.1f} days, {days[1]:.1f} in 8 shards each")


if __name__ == "__main__":
    main()
