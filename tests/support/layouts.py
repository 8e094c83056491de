"""Checkpoints in the layouts of the training systems, written with torch alone: the same files and keys as the real
writers leave (which have tests of their own), small and quick enough for campaigns.

Each writer takes the run's folder, a step and a seed, and returns the checkpoint's path. Paths contain the step.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from support.runs import WRITERS as PLAIN
from support.runs import save_file, state_dict

State = dict[str, torch.Tensor]
FLOATS = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)


def weights(seed: int) -> State:
    """A few matrices and a buffer."""
    generator = torch.Generator().manual_seed(seed)
    state = {f"layers.{i}.weight": torch.randn(24, 16, generator=generator) for i in range(3)}
    return state | {"norm.running_mean": torch.randn(16, generator=generator)}


def moments(seed: int) -> dict[str, object]:
    """AdamW's state dict after some steps."""
    generator = torch.Generator().manual_seed(seed + 1000)
    state = {
        i: {
            "step": torch.tensor(float(seed)),
            "exp_avg": torch.randn(24, 16, generator=generator),
            "exp_avg_sq": torch.rand(24, 16, generator=generator) + 1e-6,
        }
        for i in range(3)
    }
    return {"state": state, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0, 1, 2]}]}


def scheduler(step: int) -> dict[str, object]:
    """A scheduler's state."""
    return {"base_lrs": [1e-3], "last_epoch": step, "_step_count": step + 1, "_last_lr": [5e-4]}


def rng_states(seed: int) -> dict[str, object]:
    """What Trainer and Accelerate keep of every generator."""
    return {
        "python": random.Random(seed).getstate(),
        "numpy": np.random.RandomState(seed).get_state(),
        "cpu": torch.Generator().manual_seed(seed).get_state(),
    }


def folder(run: Path, name: str) -> Path:
    """A new folder for a checkpoint."""
    (run / name).mkdir(parents=True)
    return run / name


def trainer_files(place: Path, step: int, seed: int, *, optimizer: bool = True) -> None:
    """What Trainer writes beside the weights, in its order."""
    if optimizer:
        torch.save(moments(seed), place / "optimizer.pt")
    torch.save(scheduler(step), place / "scheduler.pt")
    torch.save(rng_states(seed), place / "rng_state.pth")
    (place / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 1.0, "log_history": []}))


def write_trainer(run: Path, step: int, seed: int) -> str:
    """Hugging Face Trainer."""
    place = folder(run, f"checkpoint-{step}")
    (place / "config.json").write_text('{"hidden_size": 16}')
    save_file(weights(seed), place / "model.safetensors")
    trainer_files(place, step, seed)
    return place.name


def write_adapter(run: Path, step: int, seed: int) -> str:
    """The same with a LoRA adapter."""
    place = folder(run, f"checkpoint-{step}")
    save_file(weights(seed), place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    trainer_files(place, step, seed)
    return place.name


def zero_files(place: Path, step: int, seed: int, *, stage: int = 2) -> None:
    """DeepSpeed's tag folder for two ranks."""
    place.mkdir(parents=True)
    model = weights(seed)
    common = {
        "optimizer": None,
        "lr_scheduler": scheduler(step),
        "skipped_steps": 0,
        "global_steps": step,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}},
        "ds_version": "0.19.8",
    }
    if stage == 3:
        for rank in (0, 1):
            empty = OrderedDict((name, torch.empty(0)) for name in model)
            empty["norm.running_mean"] = model["norm.running_mean"]
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            torch.save({"module": empty, **common, "param_shapes": [OrderedDict()]}, place / name)
    else:
        torch.save({"module": OrderedDict(model), **common}, place / "mp_rank_00_model_states.pt")
    for rank in (0, 1):
        generator = torch.Generator().manual_seed(seed * 10 + rank)
        flat = [torch.randn(600 + rank, generator=generator)]
        base = {"state": {0: {"exp_avg": torch.randn(600, generator=generator)}}, "param_groups": [{"lr": 1e-3}]}
        inner = {"zero_stage": stage, "base_optimizer_state": base, "single_partition_of_fp32_groups": flat}
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": inner, "ds_version": "0.19.8"}, place / name)


def write_zero2(run: Path, step: int, seed: int) -> str:
    """Raw DeepSpeed, ZeRO-2."""
    zero_files(run / f"global_step{step}", step, seed)
    (run / "latest").write_text(f"global_step{step}")
    return f"global_step{step}"


def write_zero3(run: Path, step: int, seed: int) -> str:
    """Raw DeepSpeed, ZeRO-3."""
    zero_files(run / f"global_step{step}", step, seed, stage=3)
    return f"global_step{step}"


def write_trainer_deepspeed(run: Path, step: int, seed: int) -> str:
    """Trainer with DeepSpeed inside."""
    place = folder(run, f"checkpoint-{step}")
    zero_files(place / f"global_step{step}", step, seed)
    (place / "latest").write_text(f"global_step{step}")
    save_file(weights(seed), place / "model.safetensors")
    trainer_files(place, step, seed, optimizer=False)
    return place.name


def sharded(place: Path, state: dict[str, object]) -> None:
    """torch.distributed.checkpoint, several files."""
    writer = dcp.FileSystemWriter(place, single_file_per_rank=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a single process saves is what we want
        dcp.save(state, storage_writer=writer)


def optimizer_tensors(seed: int) -> State:
    """Moments by parameter name, as DCP flattens them."""
    made = moments(seed)["state"]
    return {f"layers.{i}.weight.exp_avg": made[i]["exp_avg"] for i in range(3)}  # type: ignore[index]


def write_dcp(run: Path, step: int, seed: int) -> str:
    """DCP, or torchtitan."""
    place = run / f"step-{step}"
    sharded(place, {"model": weights(seed), "optim": optimizer_tensors(seed), "step": step, "lr": 1e-3})
    return place.name


def accelerate_files(place: Path, step: int, seed: int) -> None:
    """What Accelerate writes beside the weights."""
    torch.save(scheduler(step), place / "scheduler.bin")
    for rank in (0, 1):
        states = {"step": step, "random_state": random.Random(seed).getstate(), "torch_manual_seed": torch.tensor(seed)}
        torch.save(states, place / f"random_states_{rank}.pkl")
    torch.save({"seen": step * 8}, place / "custom_checkpoint_0.pkl")


def write_accelerate(run: Path, step: int, seed: int) -> str:
    """Accelerate's save_state."""
    place = folder(run, f"checkpoint_{step}")
    save_file(weights(seed), place / "model.safetensors")
    torch.save(moments(seed), place / "optimizer.bin")
    accelerate_files(place, step, seed)
    return place.name


def write_accelerate_deepspeed(run: Path, step: int, seed: int) -> str:
    """The same with DeepSpeed inside, as Hallo saves."""
    place = folder(run, f"checkpoint-{step}")
    zero_files(place / "pytorch_model", step, seed)
    (place / "latest").write_text("pytorch_model")
    accelerate_files(place, step, seed)
    return place.name


def write_accelerate_fsdp(run: Path, step: int, seed: int) -> str:
    """The same with FSDP's sharded folders inside."""
    place = folder(run, f"checkpoint-{step}")
    sharded(place / "pytorch_model_fsdp_0", {"model": weights(seed)})
    sharded(place / "optimizer_0", {"optimizer": optimizer_tensors(seed)})
    accelerate_files(place, step, seed)
    return place.name


def write_lightning(run: Path, step: int, seed: int) -> str:
    """One .ckpt with an infinite best score, as a callback that saw nothing yet has it."""
    run.mkdir(parents=True, exist_ok=True)
    callback = {"best_model_score": torch.tensor(float("inf")), "kth_value": torch.tensor(float("-inf"))}
    state = {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": weights(seed),
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": callback},
        "optimizer_states": [moments(seed)],
        "lr_schedulers": [scheduler(step)],
        "hyper_parameters": {"lr": 1e-3},
    }
    path = run / f"epoch=0-step={step}.ckpt"
    torch.save(state, path)
    return path.name


def write_lightning_sharded(run: Path, step: int, seed: int) -> str:
    """A folder of that name, as a sharding strategy leaves it."""
    place = run / f"epoch=0-step={step}.ckpt"
    sharded(place, {"state_dict": weights(seed), "optimizer_0": optimizer_tensors(seed)})
    torch.save({"epoch": 0, "global_step": step, "pytorch-lightning_version": "2.6.6"}, place / "meta.pt")
    return place.name


def write_megatron(run: Path, step: int, seed: int) -> str:
    """Two tensor parallel ranks."""
    place = run / f"iter_{step:07d}"
    for rank in (0, 1):
        args = argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, lr=1e-3)
        optimizer = moments(seed * 10 + rank)
        for own in optimizer["state"].values():  # type: ignore[attr-defined]
            own["step"] = torch.tensor(float(step))
        state = {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": step,
            "model": {"language_model": weights(seed * 10 + rank)},
            "optimizer": {"optimizer": optimizer},
            "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": step},
            "rng_state": [rng_states(seed)],
        }
        (place / f"mp_rank_0{rank}").mkdir(parents=True)
        torch.save(state, place / f"mp_rank_0{rank}" / "model_optim_rng.pt")
    return place.name


def write_wenet(run: Path, step: int, seed: int) -> str:
    """A flat pair."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "train.yaml").write_text("encoder: conformer\n")
    torch.save(OrderedDict(weights(seed)), run / f"step_{step}.pt")
    (run / f"step_{step}.yaml").write_text(f"tag: step_{step}\nstep: {step}\nepoch: 0\nlrs:\n- 0.001\n")
    return f"step_{step}.pt"


def write_nanovlm(run: Path, step: int, seed: int) -> str:
    """save_pretrained with a tied weight named in the header."""
    place = folder(run, f"step_{step}")
    (place / "config.json").write_text('{"lm_max_length": 128}')
    path = place / "model.safetensors"
    from safetensors.torch import save_file as save_with_metadata

    save_with_metadata(weights(seed), path, metadata={"format": "pt", "head.weight": "layers.0.weight"})
    path.chmod(0o644)
    return place.name


def write_legacy(run: Path, step: int, seed: int) -> str:
    """torch.save's format before zip archives."""
    run.mkdir(parents=True, exist_ok=True)
    state = {"model": state_dict(seed), "optimizer": moments(seed)}
    torch.save(state, run / f"net-{step}.pth", _use_new_zipfile_serialization=False)
    return f"net-{step}.pth"


def write_every_float(run: Path, step: int, seed: int) -> str:
    """One matrix of every float dtype, complex ones too, and opaque ones beside them."""
    run.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(12, 12, generator=generator).to(getattr(torch, name)) for name in FLOATS}
    state |= {f"complex{2 * b}": torch.randn(6, 6, 2, generator=generator).to(f) for b, f in _PARTS}
    state = {n: torch.view_as_complex(t) if n.startswith("complex") else t for n, t in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but files with them exist
        state["quantised"] = torch.quantize_per_tensor(torch.randn(6, 6, generator=generator), 0.1, 0, torch.qint8)
    state["counts"] = torch.arange(10)
    torch.save(state, run / f"floats-{step}.pt")
    return f"floats-{step}.pt"


_PARTS = ((16, torch.float16), (32, torch.float32), (64, torch.float64))


def write_npz(run: Path, step: int, seed: int) -> str:
    """numpy's archive."""
    run.mkdir(parents=True, exist_ok=True)
    arrays = {name: tensor.numpy() for name, tensor in weights(seed).items()}
    np.savez(run / f"weights-{step}.npz", **arrays)
    return f"weights-{step}.npz"


def write_bare_pickle(run: Path, step: int, seed: int) -> str:
    """A folder of safetensors with a pickled optimizer that holds numpy arrays."""
    place = folder(run, f"step_{step}")
    save_file(weights(seed), place / "model.safetensors")
    (place / "state.pkl").write_bytes(pickle.dumps({"lr": 1e-3, "seen": step, "mean": np.arange(4.0)}))
    return place.name


LAYOUT_WRITERS: dict[str, Callable[[Path, int, int], str]] = {
    "trainer": write_trainer,
    "adapter": write_adapter,
    "trainer-deepspeed": write_trainer_deepspeed,
    "accelerate": write_accelerate,
    "accelerate-deepspeed": write_accelerate_deepspeed,
    "accelerate-fsdp": write_accelerate_fsdp,
    "zero2": write_zero2,
    "zero3": write_zero3,
    "dcp": write_dcp,
    "lightning": write_lightning,
    "lightning-sharded": write_lightning_sharded,
    "megatron": write_megatron,
    "wenet": write_wenet,
    "nanovlm": write_nanovlm,
    "legacy": write_legacy,
    "every-float": write_every_float,
    "npz": write_npz,
    "pickle": write_bare_pickle,
}
WRITERS = {**PLAIN, **LAYOUT_WRITERS}
LAYOUT_OF = {
    "trainer": "hf-trainer",
    "adapter": "hf-trainer",
    "trainer-deepspeed": "hf-trainer",
    "accelerate": "accelerate",
    "accelerate-deepspeed": "accelerate",
    "accelerate-fsdp": "accelerate",
    "zero2": "deepspeed",
    "zero3": "deepspeed",
    "dcp": "dcp",
    "lightning": "lightning",
    "lightning-sharded": "lightning",
    "megatron": "megatron",
    "wenet": "wenet",
    "nanovlm": "folder",
    "legacy": "file",
    "every-float": "file",
    "npz": "file",
    "pickle": "folder",
}
