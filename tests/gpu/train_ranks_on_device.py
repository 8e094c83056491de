"""One rank of a guarded training on a device, by DDP or FSDP2, that goes back once and is resumed; beside it the same
training that never failed. Prints what it found as one line of JSON.

    python train_ranks_on_device.py FOLDER KIND BACKEND DEVICE RANK SIZE MEETING
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys

import torch
import torch.distributed as dist
from support.guards import guarded
from torch import nn

import ckptguard

TOTAL, SAVE_EVERY, BACK_AT = 9, 3, 8


def make(kind: str, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that all ranks share, and its optimizer."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    else:
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of all that this rank holds of model and optimizer."""
    hasher = hashlib.sha256()
    tensors = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        hasher.update(local.detach().cpu().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def train(kind: str, device: torch.device, folder: str, *, total: int, back_at: int | None) -> list[object]:
    """Train under a guard; (steps taken, digest of the end)."""
    model, optimizer = make(kind, device)
    data = [torch.randn(8, 16, generator=torch.Generator().manual_seed(n)).to(device) for n in range(5)]
    steps = []
    with guarded(
        folder, model, optimizer, saving=ckptguard.Saving(blocking=False), deadlines=ckptguard.Deadlines(ranks=100)
    ) as guard:
        for step, batch in guard.steps(data, total=total, save_every=SAVE_EVERY):
            steps.append(step)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            guard.observe(loss=loss)
            if len(steps) == back_at:
                guard.rollback("asked by the test")
        return [steps, digest(model, optimizer)]


def main() -> None:
    """Train three times: whole; going back; and the rest of what was going back, by new objects."""
    folder, kind, backend, device_type, rank, size, meeting = sys.argv[1:]
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", int(rank) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=int(rank),
        world_size=int(size),
        timeout=datetime.timedelta(seconds=100),
    )
    found = {
        "whole": train(kind, device, f"{folder}/whole", total=TOTAL, back_at=None),
        "back": train(kind, device, f"{folder}/back", total=TOTAL, back_at=BACK_AT),
        "parts": [train(kind, device, f"{folder}/parts", total=n, back_at=None) for n in (4, TOTAL)],
    }
    print("FOUND" + json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
