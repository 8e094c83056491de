"""What trainers leave in a folder, in small: their names, and files with weights, an optimizer's state, counters."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

HEALTHY, SICK = False, True
SEED = 1  # another one trains to other weights


def weights_of(update: int, seed: int) -> torch.Tensor:
    """The weights after so many updates."""
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(update + seed))


def training_state(update: int, *, sick: bool = HEALTHY, **beside: object) -> dict[str, object]:
    """A state after so many updates; a sick one holds NaN in its weights."""
    weight = weights_of(update, SEED)
    if sick:
        weight[3, 5] = float("nan")
    moments = {"step": torch.tensor(float(update)), "exp_avg": weight / 7, "exp_avg_sq": weight**2}
    groups = [{"lr": 1e-3, "params": [0]}]
    return {"model": {"layer.weight": weight}, "optimizer": {"state": {0: moments}, "param_groups": groups}, **beside}


def save(path: Path, update: int, *, sick: bool = HEALTHY, **beside: object) -> None:
    """Save such a state over whatever lies there, by another file that is renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    torch.save(training_state(update, sick=sick, **beside), temporary)
    temporary.replace(path)


def load(path: Path) -> dict[str, object]:
    """What a trainer's resume loads."""
    return torch.load(path, weights_only=True)


def update_of(state: dict[str, object]) -> int:
    """After how many updates a state was saved; -1 for a sick one."""
    model, optimizer = state["model"], state["optimizer"]
    finite = bool(torch.isfinite(model["layer.weight"]).all())  # type: ignore[index]
    return int(optimizer["state"][0]["step"]) if finite else -1  # type: ignore[index]


def open_clip(run: Path, epoch: int, *, sick: bool = HEALTHY) -> None:
    """``epoch_3.pt``, and ``epoch_latest.pt`` with the same content."""
    for name in (f"epoch_{epoch}.pt", "epoch_latest.pt"):
        save(run / name, epoch * 10, sick=sick, epoch=epoch, name="run")


def timm(run: Path, epoch: int, *, sick: bool = HEALTHY) -> None:
    """``last.pth.tar``, and a hard link to it as ``checkpoint-3.pth.tar``."""
    save(run / "last.pth.tar", epoch * 10, sick=sick, epoch=epoch, arch="net")
    (run / f"checkpoint-{epoch}.pth.tar").unlink(missing_ok=True)
    (run / f"checkpoint-{epoch}.pth.tar").hardlink_to(run / "last.pth.tar")


def nanogpt(run: Path, epoch: int, *, sick: bool = HEALTHY) -> None:
    """``ckpt.pt`` alone, saved over in place."""
    run.mkdir(parents=True, exist_ok=True)
    torch.save(training_state(epoch * 10, sick=sick, iter_num=epoch * 10, best_val_loss=1.0), run / "ckpt.pt")


def fairseq(run: Path, epoch: int, *, sick: bool = HEALTHY) -> None:
    """``checkpoint_1_30.pt``, copied to ``checkpoint_last.pt``."""
    path = run / f"checkpoint_1_{epoch * 10}.pt"
    save(path, epoch * 10, sick=sick, optimizer_history=[{"num_updates": epoch * 10}])
    shutil.copyfile(path, run / "checkpoint_last.pt")


def two_folders(run: Path, epoch: int, *, sick: bool = HEALTHY) -> None:
    """``epochs/epoch_3.pt``, then ``weights/last.pt``, which the resume reads."""
    for name in (f"epochs/epoch_{epoch}.pt", "weights/last.pt"):
        save(run / name, epoch * 10, sick=sick, epoch=epoch)


def linked(run: Path, epoch: int, *, sick: bool = HEALTHY) -> None:
    """``checkpoints/step_30.pt``, and ``last.pt`` above, which is a link to it."""
    save(run / f"checkpoints/step_{epoch * 10}.pt", epoch * 10, sick=sick)
    temporary = run / ".tmp-last.pt"
    temporary.symlink_to(f"checkpoints/step_{epoch * 10}.pt")
    temporary.replace(run / "last.pt")


def numbered(run: Path, epoch: int, *, sick: bool = HEALTHY) -> None:
    """``model_30_steps.pt`` alone, saved over in place where it is there."""
    run.mkdir(parents=True, exist_ok=True)
    torch.save(training_state(epoch * 10, sick=sick, num_timesteps=epoch * 10), run / f"model_{epoch * 10}_steps.pt")


TRAINERS = {
    "open_clip": (open_clip, "epoch_latest.pt"),
    "timm": (timm, "last.pth.tar"),
    "nanoGPT": (nanogpt, "ckpt.pt"),
    "fairseq": (fairseq, "checkpoint_last.pt"),
    "in two folders": (two_folders, "weights/last.pt"),
    "by a link": (linked, "last.pt"),
    "by its number": (numbered, "model_30_steps.pt"),
}
"""How each saves after an epoch of ten updates, and the name from which its own resume goes on."""
