"""Runs as WeNet leaves them, by the lines of its ``save_checkpoint`` and ``save_model`` (WeNet is not on PyPI).

epochs: flat ``epoch_N.pt`` with ``epoch_N.yaml``, ``init`` and the dangling ``final.pt``; steps: ``step_N``;
converted: ``epoch_N.pt/pytorch_model.bin``, what its DeepSpeed engine leaves; tags: its DeepSpeed tag folders, taken
from a run of DeepSpeed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from evidence import record
from small_model import State, train


def write_epochs(run: Path) -> None:
    """Epoch mode."""
    run.mkdir(parents=True)
    (run / "train.yaml").write_text("accum_grad: 1\ndataset: asr\n", encoding="utf-8")
    states = train(seed=0, steps=(0, 40, 80, 120))
    save(run, "init", states[0], epoch=-1)
    for epoch, state in enumerate(states[1:]):
        save(run, f"epoch_{epoch}", state, epoch)
        record(run, state.step, model=state.model)
    (run / "final.pt").symlink_to("2.pt")  # as upstream has it: the file is epoch_2.pt


def write_steps(run: Path) -> None:
    """Step mode; the run ends with one epoch_0."""
    run.mkdir(parents=True)
    (run / "train.yaml").write_text("accum_grad: 1\ndataset: asr\n", encoding="utf-8")
    states = train(seed=1, steps=(0, 1, 3, 5, 7))
    save(run, "init", states[0], epoch=-1)
    for state in states[1:-1]:
        save(run, f"step_{state.step}", state, 0)
        record(run, state.step, model=state.model)
    save(run, "epoch_0", states[-1], 0)
    (run / "final.pt").symlink_to("epoch_0.pt")


def write_converted(run: Path) -> None:
    """DeepSpeed in mode model_only: the converter makes a folder where WeNet wants a file."""
    run.mkdir(parents=True)
    for epoch, state in enumerate(train(seed=2, steps=(40, 80, 120))):
        folder = run / f"epoch_{epoch}.pt"
        folder.mkdir()
        torch.save(state.model, folder / "pytorch_model.bin")
        write_yaml(run, f"epoch_{epoch}", state.step, epoch)
        record(run, state.step, model=state.model)
    (run / "latest").write_text("epoch_2", encoding="utf-8")  # names a tag folder that was deleted


def write_tags(run: Path, deepspeed_run: Path, steps: tuple[int, ...]) -> None:
    """DeepSpeed in mode model+optimizer: tag folders named after epochs, from those that DeepSpeed wrote."""
    run.mkdir(parents=True)
    for epoch, step in enumerate(steps):
        shutil.copytree(deepspeed_run / f"global_step{step}", run / f"epoch_{epoch}")
        write_yaml(run, f"epoch_{epoch}", step, epoch)
    (run / "latest").write_text(f"epoch_{len(steps) - 1}", encoding="utf-8")
    shutil.copy(deepspeed_run / "zero_to_fp32.py", run)


def save(run: Path, tag: str, state: State, epoch: int) -> None:
    """WeNet's save_model on rank 0: the weights, then the yaml twice."""
    torch.save(state.model, run / f"{tag}.pt")
    for _ in range(2):
        write_yaml(run, tag, state.step, epoch)


def write_yaml(run: Path, tag: str, step: int, epoch: int) -> None:
    """The facts beside the weights, as yaml.dump leaves them."""
    lines = (
        "accum_grad: 1",
        "dataset: asr",
        "dtype: fp32",
        f"epoch: {epoch}",
        "loss_dict:",
        "  acc: 0.25",
        "  loss: 2.5",
        "lrs:",
        "- 0.002",
        "model_conf:",
        "  step: 7",
        "save_time: 21/11/2026 12:00:00",
        f"step: {step}",
        f"tag: {tag}",
        "train_engine: torch_ddp",
    )
    (run / f"{tag}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
