"""A tiny training that several ranks share: FSDP2 or DDP, on the CPU. Run by `rank_processes`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from support.views import look
from torch import nn

import ckptguard
from ckptguard.records.manifests import read_manifest
from ckptguard.records.run import open_run
from ckptguard.replicas.replicate import replicate
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.ranks import ranks_of_training
from ckptguard.training.saving.destinations import SaveTurn
from ckptguard.training.sharded import dcp_plan
from ckptguard.training.sharded.sharded_store import ShardedStore
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.values.ids import CheckpointId
from ckptguard.values.settings import Settings
from ckptguard.verification.checkpoint import verify_checkpoint

SETTINGS = Settings(settle=0)


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    """A model that all ranks share, its optimizer and scheduler."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(model, optimizer, scheduler, first: int, last: int) -> None:
    """The updates from `first` to `last`; every rank has the same batches, so any number of ranks computes the same."""
    for step in range(first, last + 1):
        torch.manual_seed(step)
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def digest(model, optimizer) -> str:
    """SHA-256 of everything that model and optimizer are, whole, whatever the sharding."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=False)
    weights, state = get_state_dict(model, optimizer, options=whole)
    hasher = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        hasher.update(name.encode() + tensor.numpy().tobytes())
    for name, values in sorted(state.get("state", {}).items()):
        for key, tensor in sorted(values.items()):
            hasher.update(f"{name}.{key}".encode() + tensor.numpy().tobytes())
    rates = [group["lr"] for group in state["param_groups"]]
    return hasher.hexdigest() + json.dumps(rates)


def store_for(folder: str, parts: TrainingParts) -> tuple[ShardedStore, object]:
    """The store of a run on this rank."""
    os.makedirs(folder, exist_ok=True)
    run = open_run(folder)
    return ShardedStore(run, parts, ranks_of_training(30), SETTINGS), run


def save_and_go_on(kind: str, folder: str, step: int) -> list[object]:
    """Train to a step, save, train on for two; return both digests and what the checkpoint is found to be."""
    model, optimizer, scheduler = make(kind)
    store, run = store_for(folder, TrainingParts(model=model, optimizer=optimizer, scheduler=scheduler))
    train(model, optimizer, scheduler, 1, step)
    save = store.prepare(step, {"mine": f"rank {dist.get_rank()}"})
    save.write(SaveTurn())
    before = digest(model, optimizer) if step else ""
    train(model, optimizer, scheduler, step + 1, step + 2)
    outcome = None
    if dist.get_rank() == 0:
        view = look(run, SETTINGS)
        checked = verify_checkpoint(view, view.checkpoint(save.path))
        outcome = [checked.outcome.value, checked.digest_origin, [f.message for f in checked.findings]]
    return [before, digest(model, optimizer), outcome]


def load_and_go_on(kind: str, folder: str, step: int) -> list[object]:
    """Load what `save_and_go_on` saved into a training that went elsewhere, and go on from there."""
    model, optimizer, scheduler = make(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    train(model, optimizer, scheduler, 100, 103)
    store, run = store_for(folder, TrainingParts(model=model, optimizer=optimizer, scheduler=scheduler))
    extra: dict[str, object] = {}

    def load() -> str:
        extra.update(store.read(read_manifest(run, CheckpointId(store.series, step, 1))))
        return "done"

    assert store.led.lead(load) == "done"
    extra = extra if dist.get_rank() == 0 else store.led.own
    before = digest(model, optimizer) if step else ""
    train(model, optimizer, scheduler, step + 1, step + 2)
    return [before, digest(model, optimizer), extra.get("mine")]


def load_into_another(folder: str, step: int, strict: bool) -> object:
    """Load what `save_and_go_on` saved into a model with one layer more and one less; what did not fit."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Identity(), nn.Linear(9, 3))
    parts = TrainingParts(model=model, optimizer=torch.optim.AdamW(model.parameters()), strict=strict)
    store, run = store_for(folder, parts)
    try:
        manifest = read_manifest(run, CheckpointId(store.series, step, 1))
        store.led.lead(lambda: store.read(manifest).get("mine"))
    except ckptguard.CkptguardError as error:
        return [error.kind, error.message]
    return [parts.missing, parts.unexpected, model[0].weight.sum().item()]


def guarded(kind: str, folder: str, total: int, trouble: str) -> dict[str, object]:
    """A guarded training; at step 6 something happens, on rank 1 only. "lost": before that, what was saved is lost, and
    lies in a replica alone."""
    model, optimizer, scheduler = make(kind)
    happened, steps = dist.get_rank() != 1, []
    data = [torch.full((8, 6), float(i)).sin() + torch.arange(8.0)[:, None] for i in range(16)]
    guard = ckptguard.TrainingGuard(
        folder,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        daemon="off",
        settings=SETTINGS,
        policy=ckptguard.RollbackPolicy(skip=False, check_every=1),
        deadlines=ckptguard.Deadlines(ranks=60),
        saving=ckptguard.Saving(replicas=f"{folder}-replica" if trouble == "lost" else ()),
    )
    try:
        for step, batch in guard.steps(data, total=total, save_every=2):
            steps.append(step)
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step == 5 and trouble == "lost" and dist.get_rank() == 0:
                lose(folder)
            if step == 6 and not happened:
                happened = True
                harm(model, trouble)
            guard.observe(loss=loss)
        return {"steps": steps, "digest": digest(model, optimizer)}
    except ckptguard.CkptguardError as error:
        return {"steps": steps, "error": error.kind, "message": error.message}


def lose(folder: str) -> None:
    """Have the good checkpoints of a run in a replica, and nowhere else."""
    run, settings = open_run(folder), SETTINGS
    reconcile(look(run, settings), PassNotes())
    if os.path.isdir(f"{folder}/step-000000004"):
        replicate(look(run, settings), f"{folder}-replica")
    kept = Path(folder, "_ckptguard", "kept")  # the second time there is none: what was removed is not made at once
    for path in (*Path(folder).glob("step-*"), *([kept] if kept.exists() else ())):
        shutil.rmtree(path)


def harm(model: nn.Module, trouble: str) -> None:
    """Poison what this rank holds of a model, or end this rank: now, in the next save, or in the next load."""
    if trouble == "killed":
        die()
    if trouble == "killed in a save":
        dcp_plan._HashingStream.write = die
    if trouble == "killed in a rollback":
        ShardedStore._load_shards = die
        trouble = "nan weight"
    with torch.no_grad():
        if trouble == "nan buffer":
            next(b for name, b in model.named_buffers() if name.endswith("running_mean"))[0] = torch.nan
        if trouble in ("nan weight", "lost"):
            weight = next(model.parameters())
            (weight.to_local() if hasattr(weight, "to_local") else weight).view(-1)[0] = torch.nan


def die(*_: object) -> int:
    """End this process as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0
