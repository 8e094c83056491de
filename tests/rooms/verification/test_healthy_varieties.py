"""Checkpoints that people have and that look odd at first: GOOD, and without a warning."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.layouts import moments, scheduler, trainer_files, weights
from support.runs import QUICK, save_file

from ckptguard.values.verdict import Outcome, Severity
from ckptguard.verification.target import Selection, verify_target


def accelerate_beside(place: Path, step: int) -> None:
    """What Accelerate writes after the weights, whoever saved those."""
    torch.save(moments(step), place / "optimizer.bin")
    torch.save(scheduler(step), place / "scheduler.bin")
    (place / "random_states_0.pkl").write_bytes(pickle.dumps({"step": step, "random_state": (3, (1, 2), None)}))


def saved_by_a_hook(run: Path, step: int) -> None:
    """diffusers' training scripts: a hook saves the weights in a folder of their own."""
    for part in ("unet", "unet_ema"):
        place = run / f"checkpoint-{step}" / part
        place.mkdir(parents=True)
        save_file(weights(step), place / "diffusion_pytorch_model.safetensors")
        (place / "config.json").write_text("{}")
    accelerate_beside(run / f"checkpoint-{step}", step)


def lora_by_a_hook(run: Path, step: int) -> None:
    """The same for a LoRA."""
    place = run / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_file(weights(step), place / "pytorch_lora_weights.safetensors")
    accelerate_beside(place, step)


def projector_only(run: Path, step: int) -> None:
    """A Trainer that saves only what it trains, under a name of its own."""
    place = run / f"checkpoint-{step}"
    place.mkdir(parents=True)
    torch.save(weights(step), place / "mm_projector.bin")
    trainer_files(place, step, step)


def index_of_another_name(run: Path, step: int) -> None:
    """torchtune's shards are not named as their index is."""
    place = run / f"epoch_{step}"
    place.mkdir(parents=True)
    shards = {name: f"ft-model-{n:05d}-of-00002.safetensors" for n, name in enumerate(list(weights(0))[:2], start=1)}
    for name, shard in shards.items():
        save_file({name: weights(step)[name]}, place / shard)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def tar_suffix(run: Path, step: int) -> None:
    """PyTorch's ImageNet example and its many children."""
    run.mkdir(parents=True, exist_ok=True)
    state = {"epoch": step, "state_dict": weights(step), "optimizer": moments(step), "best_acc1": 0.5}
    torch.save(state, run / f"checkpoint_{step}.pth.tar")
    torch.save(state, run / "model_best.pth.tar")


def attributes_of_macos(run: Path, step: int) -> None:
    """Copied by way of a disk that knows no extended attributes."""
    place = run / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_file(weights(step), place / "model.safetensors")
    trainer_files(place, step, step)
    for name in ("._model.safetensors", "._optimizer.pt", ".DS_Store"):
        (place / name).write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X        ")


def shards_of_xla(run: Path, step: int) -> None:
    """Trainer on TPUs: each rank's optimizer in a file of its own."""
    place = run / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_file(weights(step), place / "model.safetensors")
    trainer_files(place, step, step, optimizer=False)
    for rank in (0, 1):
        torch.save({"optimizer": moments(step), "shard_metadata": {}}, place / f"rank{rank}-of-2-optimizer.pt")


HEALTHY: list[Callable[[Path, int], None]] = [
    saved_by_a_hook,
    lora_by_a_hook,
    projector_only,
    index_of_another_name,
    tar_suffix,
    attributes_of_macos,
    shards_of_xla,
]


@pytest.mark.parametrize("write", HEALTHY, ids=lambda write: write.__name__)
def test_it_is_good_without_a_warning(write, tmp_path):
    """Three steps of it, judged in their order and once more."""
    for step in (10, 20, 30):
        write(tmp_path / "run", step)
    for _ in range(2):
        report = verify_target(str(tmp_path / "run"), QUICK, Selection(wait=0))
        heavy = [f for c in report.checkpoints for f in c.findings if f.severity is not Severity.NOTICE]
        assert (report.outcome, heavy) == (Outcome.GOOD, [])
        assert {c.step for c in report.checkpoints} >= {10, 20, 30}


def test_a_hooked_save_that_ended_early_is_incomplete(tmp_path):
    """The weights are in their folder and the optimizer is there, but what Accelerate writes last is not."""
    saved_by_a_hook(tmp_path / "run", 10)
    (tmp_path / "run/checkpoint-10/random_states_0.pkl").unlink()
    assert verify_target(str(tmp_path / "run"), QUICK, Selection(wait=0)).outcome is Outcome.INCOMPLETE


def test_a_trainer_starts_anew_without_its_scheduler(tmp_path):
    """It loads the optimizer's state only if both files are there."""
    projector_only(tmp_path / "run", 10)
    (tmp_path / "run/checkpoint-10/scheduler.pt").unlink()
    report = verify_target(str(tmp_path / "run"), QUICK, Selection(wait=0))
    assert report.outcome is Outcome.INCOMPLETE
    assert [f.file for f in report.checkpoints[0].findings if f.severity is Severity.ERROR] == [
        "checkpoint-10/scheduler.pt"
    ]
