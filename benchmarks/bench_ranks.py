"""Saving by many ranks, each a process: the guard's save beside DCP's own, and what watching costs a step.

    python -m benchmarks.bench_ranks [--ranks 16] [--mib 512] [--runs 5] [--steps 200] [--folder DIR]

The ranks share a model with AdamW under FSDP2, over gloo. Prints the median of ratios, taken in turns, of a save by the
guard, which is sealed and read back, to `torch.distributed.checkpoint.save`, until all ranks have done it. And the
processor time that a rank spends between two steps in `guard.steps` and `observe`: with more ranks than processors the
wall clock would count the others.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.rank_processes import run_ranks
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptguard
from benchmarks.measuring import median_ratio, options, seconds

SIDE = 1024


def together(act: Callable[[], object]) -> float:
    """The seconds until all ranks have done it."""
    dist.barrier()
    return seconds(lambda: (act(), dist.barrier()))


def measured(folder: str, mib: int, runs: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """What each rank does: the seconds of the guard's saves and of DCP's, and those between steps."""
    layers = max(1, round(mib * 2**20 / (3 * SIDE * SIDE * 4)))
    model = torch.nn.Sequential(*[torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)])
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, SIDE)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

    def by_dcp() -> None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/dcp")

    ours, theirs, between = [], [], []
    with ckptguard.TrainingGuard(f"{folder}/run", model=model, optimizer=optimizer, daemon="off") as guard:
        for number in range(1, runs + 2):
            ours.append(together(lambda step=number: guard.save(step=step)))
            theirs.append(together(by_dcp))
        left = time.process_time()
        for step, _ in guard.steps(range(10**6), total=runs + 1 + steps, save_every=10**9):
            between.append(time.process_time() - left)
            left = time.process_time()  # an empty step: what counts lies between two
            guard.observe(loss=2.0, grad_norm=1.0)
            if step == runs + steps:  # the save at the end is none of it
                break
    return ours[1:], theirs[1:], between[1:]  # the first of each makes its memory


def main() -> None:
    """Let the ranks measure, and print what the first one says."""
    from benchmarks import bench_ranks  # the ranks import it by this name

    given = options(__doc__, ranks=16, mib=512, runs=5, steps=200, folder=Path)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        arguments = (f"{folder}", given.mib, given.runs, given.steps)
        ended = run_ranks(bench_ranks.measured, *arguments, ranks=given.ranks, timeout=1500)
    failed = [err for code, _, err in ended if code]
    if failed:
        raise SystemExit(failed[0])
    ours, theirs, between = ended[0][1]
    print(f"{given.ranks} ranks, {given.mib} MiB in all, medians of {given.runs} runs")
    seconds_of_each = f"({statistics.median(ours):.2f} s, {statistics.median(theirs):.2f} s)"
    print(f"  a save: {median_ratio(ours, theirs):.2f} x DCP's save {seconds_of_each}")
    print(f"  between two steps: {statistics.median(between) * 1e6:.0f} us of a rank's processor time")


if __name__ == "__main__":
    main()
