"""What the documents' examples work on: a run of a Trainer, a downloaded model, and a run that a guard went through."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HOUR = 1_767_225_600  # files are as old as a real run's


def fill(folder: Path) -> None:
    """Make `runs/exp1` and `models/llama` in an empty folder."""
    for step in (100, 200, 300, 400):
        write_checkpoint(folder / "runs/exp1" / f"checkpoint-{step}", step)
    write_download(folder / "models/llama")


def weights(seed: int) -> dict[str, torch.Tensor]:
    """A tiny transformer's tensors."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (32, 16), "lm_head.weight": (32, 16)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}.weight": (16, 16) for name in ("self_attn.q_proj", "mlp.up_proj")}
    return {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}


def write_checkpoint(path: Path, step: int) -> None:
    """A checkpoint as the Trainer leaves it. That of step 400 has NaN in a layer and in its optimizer state."""
    path.mkdir(parents=True)
    early, late = weights(1), weights(2)
    model = {name: early[name] + late[name] * step / 4000 for name in early}
    state = {
        i: {"step": torch.tensor(float(step)), "exp_avg": w / 9, "exp_avg_sq": w * w}
        for i, w in enumerate(model.values())
    }
    norm = 1.25
    if step == 400:
        model["model.layers.1.mlp.up_proj.weight"][3, 2:9] = float("nan")
        state[3]["exp_avg"][:] = norm = float("nan")
    save_file(model, path / "model.safetensors", metadata={"format": "pt"})
    torch.save({"state": state, "param_groups": [{"lr": 1e-3, "params": list(state)}]}, path / "optimizer.pt")
    torch.save({"last_epoch": step, "_last_lr": [1e-3]}, path / "scheduler.pt")
    torch.save({"cpu": torch.zeros(16, dtype=torch.uint8)}, path / "rng_state.pth")
    log = [{"step": s, "loss": 3 - s / 200, "grad_norm": norm if s == step else 1.0} for s in range(100, step + 1, 100)]
    trainer = {"global_step": step, "epoch": step / 400, "log_history": log, "max_steps": 1000}
    (path / "trainer_state.json").write_text(json.dumps(trainer))
    (path / "config.json").write_text('{"model_type": "llama"}')
    age(path, step)


def write_download(path: Path) -> None:
    """A model in two shards with their index, and the list of checksums that its publisher made."""
    path.mkdir(parents=True)
    model = weights(7)
    names = sorted(model)
    places: dict[str, str] = {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({n: model[n] for n in part}, path / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    total = sum(t.numel() * 4 for t in model.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (path / "config.json").write_text('{"model_type": "llama"}')
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(path.iterdir())]
    (path / "SHA256SUMS").write_text("".join(sums))
    age(path, 0)


def age(path: Path, minutes: int) -> None:
    """Let files be an hour old and more, so that nothing waits for them to be quiet."""
    for file in path.iterdir():
        os.utime(file, (HOUR + 60 * minutes, HOUR + 60 * minutes))


def train_into_nan(run: Path) -> None:
    """A guarded training in which one batch overflows: it goes back, leaves that batch out, and ends well."""
    import ckptguard

    torch.manual_seed(0)
    inputs = torch.randn(640, 16)
    inputs[25 * 16] *= 1e30
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=16)
    parts = {"encoder": torch.nn.Linear(16, 64), "act": torch.nn.ReLU(), "head": torch.nn.Linear(64, 1)}
    model = torch.nn.Sequential(collections.OrderedDict(parts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ckptguard.TrainingGuard(str(run), model=model, optimizer=optimizer, daemon="off") as guard:
        for _, (batch,) in guard.steps(loader, total=40, save_every=10):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            guard.observe(loss=loss, grad_norm=norm)


def copy(source: Path, target: Path) -> None:
    """The same again, for one page."""
    shutil.copytree(source, target, dirs_exist_ok=True)


def in_a_process(work: str, place: Path) -> None:
    """Do it in a process of its own: an incident notes the versions of everything that is imported."""
    subprocess.run([sys.executable, __file__, work, place], check=True, capture_output=True)


if __name__ == "__main__":
    {"fill": fill, "train_into_nan": train_into_nan}[sys.argv[1]](Path(sys.argv[2]))
