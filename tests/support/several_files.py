"""What trainers leave that save a training in several files, in small: their own names and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

Sick = frozenset[str]  # words for the parts that hold NaN


def weights(step: int, name: str, *, sick: bool = False) -> dict[str, torch.Tensor]:
    """The weights of one part; `step` can be read back from them."""
    weight = torch.rand(24, 16, generator=torch.Generator().manual_seed(step)) + 1
    weight[0, 0] = float("nan") if sick else step
    return {f"{name}.weight": weight, f"{name}.bias": torch.rand(16)}


def optimizer(step: int) -> dict[str, Any]:
    """The state dict of an Adam."""
    moments = torch.rand(24, 16, generator=torch.Generator().manual_seed(step)) + 1
    moments[0, 0] = step
    state = {0: {"step": torch.tensor(float(step)), "exp_avg": moments, "exp_avg_sq": moments**2}}
    return {"state": state, "param_groups": [{"lr": 1e-3, "params": [0]}]}


def save(path: Path, state: object) -> None:
    """Save over whatever lies there, by another file that is renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("wb") as file:
        torch.save(state, file)
    temporary.replace(path)


def step_of(path: Path) -> int | None:
    """The step after which a file was saved, None if it holds NaN."""
    tensors = [*_tensors(torch.load(path, weights_only=True))]
    if not all(torch.isfinite(tensor).all() for tensor in tensors):
        return None
    return int(next(tensor for tensor in tensors if tensor.dim() == 2)[0, 0])


def _tensors(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)


def hifi_gan(run: Path, step: int, sick: Sick) -> None:
    """HiFi-GAN: torch zips without a suffix; both optimizers beside the discriminators."""
    save(run / f"g_{step:08d}", {"generator": weights(step, "gen", sick="g" in sick)})
    parts = {"mpd": weights(step, "mpd", sick="d" in sick), "msd": weights(step, "msd")}
    save(run / f"do_{step:08d}", {**parts, "optim_g": optimizer(step), "optim_d": optimizer(step), "steps": step})


def basicsr(run: Path, step: int, sick: Sick) -> None:
    """BasicSR: the resume reads the ``.state``, and asks for the networks of its number."""
    for name in "gd":
        save(run / f"models/net_{name}_{step}.pth", {"params": weights(step, name, sick=name in sick)})
    state = {"epoch": step // 100, "iter": step, "optimizers": [optimizer(step)], "schedulers": []}
    save(run / f"training_states/{step}.state", state)


def vits(run: Path, step: int, sick: Sick) -> None:
    """VITS: G and D, each with its own optimizer; the newest two of each stay."""
    for name in "gd":
        state = {"model": weights(step, name, sick=name in sick), "optimizer": optimizer(step)}
        save(run / f"{name.upper()}_{step}.pth", {**state, "iteration": step // 100, "learning_rate": 1e-4})
        (run / f"{name.upper()}_{step - 200}.pth").unlink(missing_ok=True)


def cyclegan(run: Path, step: int, sick: Sick) -> None:
    """CycleGAN: the epoch before the network's name, and ``latest``, which its resume reads."""
    for epoch in ("latest", step // 100):
        for name in "gd":
            save(run / f"{epoch}_net_{name.upper()}.pth", weights(step, name, sick=name in sick))


def guided_diffusion(run: Path, step: int, sick: Sick) -> None:
    """guided-diffusion: three files, all with padded numbers behind a letter."""
    save(run / f"model{step:06d}.pt", weights(step, "net", sick="g" in sick))
    save(run / f"ema_0.9999_{step:06d}.pt", weights(step, "net", sick="d" in sick))
    save(run / f"opt{step:06d}.pt", optimizer(step))


def torchtune(run: Path, step: int, sick: Sick) -> None:
    """torchtune: a folder of weights for each epoch, and one file for the rest, which is saved over."""
    save(run / f"epoch_{step // 100}/model-00001-of-00001.bin", weights(step, "layer", sick=bool(sick)))
    (run / f"epoch_{step // 100}/config.json").write_text(json.dumps({"hidden_size": 16}))
    save(run / "recipe_state/recipe_state.pt", {"optimizer": optimizer(step), "epochs_run": step // 100, "seed": 1})


def dinov2(run: Path, step: int, sick: Sick) -> None:
    """DINOv2: a file and a pointer for each rank."""
    for rank, name in enumerate("gd"):
        state = {"model": weights(step, "net", sick=name in sick), "optimizer": optimizer(step), "iteration": step}
        save(run / f"model_{step:07d}.rank_{rank}.pth", state)
        (run / f"last_checkpoint.rank_{rank}").write_text(f"model_{step:07d}.rank_{rank}.pth")


class SeveralFiles(NamedTuple):
    """A trainer: how it saves, what known-good prints at step 300, and which of its names hold the newest save."""

    save: Callable[[Path, int, Sick], None]
    known_good: str
    resumes: tuple[str, ...]


TRAINERS = {
    "HiFi-GAN": SeveralFiles(hifi_gan, "g_00000300", ("g_00000300", "do_00000300")),
    "BasicSR": SeveralFiles(
        basicsr, "net_g_300.pth", ("models/net_g_300.pth", "models/net_d_300.pth", "training_states/300.state")
    ),
    "VITS": SeveralFiles(vits, "G_300.pth", ("G_300.pth", "D_300.pth")),
    "CycleGAN": SeveralFiles(
        cyclegan, "latest_net_G.pth", ("latest_net_G.pth", "latest_net_D.pth", "3_net_G.pth", "3_net_D.pth")
    ),
    "guided-diffusion": SeveralFiles(
        guided_diffusion, "model000300.pt", ("model000300.pt", "ema_0.9999_000300.pt", "opt000300.pt")
    ),
    "torchtune": SeveralFiles(
        torchtune, "epoch_3", ("epoch_3/model-00001-of-00001.bin", "recipe_state/recipe_state.pt")
    ),
    "DINOv2": SeveralFiles(
        dinov2, "model_0000300.rank_0.pth", ("model_0000300.rank_0.pth", "model_0000300.rank_1.pth")
    ),
}
