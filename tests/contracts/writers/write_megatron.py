"""A run as Megatron-LM's torch checkpoints lie: ``iter_0000500/mp_rank_0R/model_optim_rng.pt`` and the tracker file.

Written with torch.save in the order and with the keys of Megatron-LM's ``save_checkpoint`` (two tensor-parallel ranks
without a distributed optimizer): Megatron-LM itself wants an accelerator.
"""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from evidence import record
from small_model import train

STEPS = (250, 500, 750)


def write_megatron(run: Path) -> None:
    """Three iterations of two ranks."""
    ranks = [train(seed=rank, steps=STEPS) for rank in (0, 1)]
    for states in zip(*ranks, strict=True):
        iteration = states[0].step
        record(run, iteration, ranks=[rank_state(state) for state in states])
        for rank, state in enumerate(states):
            folder = run / f"iter_{iteration:07d}" / f"mp_rank_{rank:02d}"
            folder.mkdir(parents=True)
            torch.save(rank_state(state) | extras(iteration), folder / "model_optim_rng.pt")
        (run / "latest_checkpointed_iteration.txt").write_text(str(iteration), encoding="utf-8")


def rank_state(state) -> dict[str, object]:
    """What a rank must get back."""
    return {
        "model": state.model,
        "optimizer": {"optimizer": state.optimizer, "grad_scaler": {"scale": torch.tensor([2.0**16])}},
        "opt_param_scheduler": {"max_lr": 1e-2, "lr_warmup_steps": 4, "num_steps": state.step, "min_lr": 0.0},
    }


def extras(iteration: int) -> dict[str, object]:
    """The rest of a rank's file."""
    arguments = Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, world_size=2, lr=1e-2)
    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }
    return {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 1.5e12,
        "rng_state": [states],
    }
