"""Runs of raw DeepSpeed, two gloo ranks: tags ``global_stepN`` with ``latest``; the run's name is the ZeRO stage.

``write_deepspeed.py write ROOT zero1|zero2|zero3...``, ``resume RUN FOLDER STEP...`` (FOLDER holds the tag), and
``weights`` with the same, which loads the module alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import deepspeed_on_cpu
import torch
from evidence import compare, compare_weights, record
from leave import leave

STEPS = (2, 4, 6)


def engine(kind: str):
    """A tiny engine, equal for every call."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": kind == "zero2"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": int(kind[-1])},
        "steps_per_print": 1000,
    }
    made, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return made


def states(made):
    """What a checkpoint must give back on a rank: its partition of the fp32 weights and of both moments."""
    stage3 = made.zero_optimization_stage() == 3
    partitions = (
        made.optimizer.fp32_partitioned_groups_flat if stage3 else made.optimizer.single_partition_of_fp32_groups
    )
    model = {} if stage3 else made.module.state_dict()
    moments = [made.optimizer.optimizer.state[p] for p in partitions]
    return {
        "model": model,
        "partitions": [p.detach() for p in partitions],
        "moments": [{k: m[k] for k in ("exp_avg", "exp_avg_sq")} for m in moments],
        "steps": [made.global_steps],
    }


def main() -> None:
    """Train and save, or load and compare."""
    deepspeed_on_cpu.prepare()
    verb, arguments = sys.argv[1], sys.argv[2:]
    deepspeed.init_distributed(dist_backend="gloo")
    if verb == "write":
        for kind in arguments[1:]:
            run, made = Path(arguments[0], kind), engine(kind)
            dtype = torch.bfloat16 if kind == "zero2" else torch.float32
            for step in range(1, STEPS[-1] + 1):
                batch = torch.randn(2, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
                made.backward(made(batch).float().square().mean())
                made.step()
                if step in STEPS:
                    record(run, step, **states(made))
                    made.save_checkpoint(str(run), client_state={"epoch": 0, "seen": step})
    else:
        for run, folder, step in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
            made = engine(Path(run).name)
            if verb == "weights":
                path, _ = made.load_checkpoint(folder, tag=f"global_step{step}", load_module_only=True)
                assert path is not None, folder
                assert compare_weights(Path(run), int(step), made.module.state_dict()) == [], folder
                continue
            path, client = made.load_checkpoint(folder, tag=f"global_step{step}")
            assert path is not None, folder
            assert client["seen"] == int(step), client
            different = compare(Path(run), int(step), **states(made))
            assert different == [], f"{folder}: {different}"
    leave()


if __name__ == "__main__":
    main()
