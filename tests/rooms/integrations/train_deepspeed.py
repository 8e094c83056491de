"""``train_deepspeed.py FOLDER``: DeepSpeed engines under an EngineGuard, one after the other, with gloo ranks.

Kinds: zero2 and zero3 (a struck weight, against a run that was not struck), floor (fp16 whose loss scale is at its
minimum when a batch overflows: DeepSpeed raises), skipping (bf16, where every step is skipped from some batch on).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from unittest import mock

import deepspeed
import deepspeed_on_cpu
import torch
from deepspeed.accelerator import get_accelerator
from leave import leave
from support.tiny_trainer import same

import ckptguard.integrations
from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.errors import RollbackExhausted
from ckptguard.values.settings import Settings

TOTAL = 12


def make_engine(kind: str):
    """A tiny engine, equal for every call."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": kind == "skipping"},
        "fp16": {"enabled": kind == "floor", "initial_scale_power": 0, "hysteresis": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": 3 if kind == "zero3" else 2, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def batches(kind: str):
    """Equal for every call; the same on all ranks. Some of floor's and skipping's are too large for their dtype."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(2, 8, generator=generator) for _ in range(TOTAL)]
    if kind in ("floor", "skipping"):
        for index in range(6, TOTAL if kind == "skipping" else 7):
            made[index] *= 3e38 if kind == "skipping" else 6e4
    return made


def run(kind: str, folder: Path, *, strike: int | None = None, policy: RollbackPolicy | None = None):
    """Train; returns the engine and the steps that were made."""
    engine, made = make_engine(kind), []
    dtype = {"floor": torch.float16, "skipping": torch.bfloat16}.get(kind, torch.float32)
    guard = ckptguard.integrations.deepspeed.EngineGuard(
        engine, folder, daemon="off", settings=Settings(settle=0.0), policy=policy
    )
    with guard:
        for step, batch in guard.steps(batches(kind), total=TOTAL, save_every=3):
            made.append(step)
            guard.update(engine(batch.to(dtype)).float().square().mean())
            if step == strike:
                strike = None
                for partition in masters(engine):
                    partition.data.mul_(1e38).mul_(1e38)
    return engine, made


def masters(engine):
    """The weights in fp32, as far as they are this rank's."""
    zero = engine.optimizer
    return getattr(zero, "fp32_partitioned_groups_flat", getattr(zero, "single_partition_of_fp32_groups", []))


def states(engine):
    """This rank's part of everything."""
    partitions = masters(engine)
    moments = [engine.optimizer.optimizer.state[p] for p in partitions]
    return [[p.detach() for p in partitions], moments, engine.lr_scheduler.state_dict()]


def replay(kind: str, folder: Path) -> None:
    untouched, _ = run(kind, folder / "untouched")
    struck, made = run(kind, folder / "struck", strike=7, policy=RollbackPolicy(skip=False))
    assert len(made) > TOTAL, made
    assert same(states(struck), states(untouched)), made


def floor(folder: Path) -> None:
    accelerator = get_accelerator()
    able = {"is_fp16_supported": lambda: True, "supported_dtypes": lambda: [torch.float32, torch.float16]}
    with mock.patch.multiple(accelerator, **able):
        engine, made = run("floor", folder / "struck")
    assert made == [*range(1, 8), *range(7, TOTAL + 1)], made
    assert all(p.isfinite().all() for p in engine.module.parameters())
    assert engine.optimizer.loss_scaler.cur_scale > 1  # it was raised to where it can fall again


def skipping(folder: Path) -> None:
    said = ""
    try:
        run("skipping", folder / "struck", policy=RollbackPolicy(skip=False, scale_skips=3, budget=1))
    except RollbackExhausted as error:
        said = error.message
    assert "skipped 3 updates in a row" in said, said


def main() -> None:
    """Train, and assert."""
    logging.basicConfig(level=logging.WARNING)
    folder = Path(sys.argv[1])
    deepspeed_on_cpu.prepare()
    deepspeed.init_distributed(dist_backend="gloo")
    replay("zero2", folder / "zero2")
    replay("zero3", folder / "zero3")
    floor(folder / "floor")
    skipping(folder / "skipping")
    leave()


if __name__ == "__main__":
    main()
