"""``train_accelerate.py ddp|fsdp2 FOLDER``: a loop under Accelerate with the guard, struck once, against one alone.

For torchrun; under DDP, or under FSDP2 with sharded checkpoints.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from unittest import mock

import accelerate
import torch
from support.tiny_trainer import same

import ckptguard.integrations
from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.values.settings import Settings

TOTAL = 14  # two epochs and a half


def sharding() -> accelerate.FullyShardedDataParallelPlugin:
    """FSDP2, and sharded checkpoints."""
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="SIZE_BASED_WRAP",
        min_num_params=1,
        state_dict_type="SHARDED_STATE_DICT",
    )


class Parts:
    """Model, optimizer, scheduler and shuffled data, equal for every call, prepared."""

    fsdp = False

    def __init__(self) -> None:
        accelerate.utils.set_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=not self.fsdp, fsdp_plugin=sharding() if self.fsdp else None)
        norm = torch.nn.LayerNorm(16) if self.fsdp else torch.nn.BatchNorm1d(16)  # it saves one rank's statistics only
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), norm, torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
        size = 6 * 4 * self.accelerator.num_processes
        data = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            self.net, optimizer, scheduler, loader
        )

    def update(self, batch):
        loss = self.model(batch).square().mean()
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss, norm

    def everything(self):
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.accelerator.unwrap_model(self.model).state_dict().values(), *moments]
        return {
            "tensors": [getattr(tensor, "_local_tensor", tensor) for tensor in tensors],
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups],
            "scheduler": self.scheduler.state_dict(),
        }


class Sharded(Parts):
    """The same under FSDP2."""

    fsdp = True


def alone(kind: type[Parts] = Parts) -> Parts:
    """Nobody guards it."""
    parts, step, epoch = kind(), 0, 0
    while step < TOTAL:
        parts.loader.set_epoch(epoch)
        for batch in parts.loader:
            parts.update(batch)
            step += 1
            if step == TOTAL:
                break
        epoch += 1
    return parts


def guarded(
    run: str, strike: int | None, policy: RollbackPolicy | None = None, kind: type[Parts] = Parts
) -> tuple[Parts, list[int]]:
    """Guarded; after one update a weight of the last rank overflows. Returns the steps that were made, too."""
    parts, made = kind(), []
    with ckptguard.integrations.accelerate.guard(
        parts.accelerator,
        run,
        model=parts.model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        daemon="off",
        settings=Settings(settle=0.0),
        policy=policy,
    ) as guard:
        for step, batch in guard.steps(parts.loader, total=TOTAL, save_every=4):
            made.append(step)
            loss, norm = parts.update(batch)
            last = parts.accelerator.process_index == parts.accelerator.num_processes - 1
            if step == strike and last:
                strike = None
                with torch.no_grad():
                    parts.net[0].weight.mul_(1e38).mul_(1e38)
            guard.observe(loss=loss, grad_norm=norm)
    return parts, made


def compare(run: Path, kind: type[Parts]) -> None:
    """On every rank."""
    untouched = alone(kind)
    struck, made = guarded(str(run), 10, RollbackPolicy(skip=False), kind)
    assert made[-1] == TOTAL, made
    assert len(made) > TOTAL, made
    ours, theirs = struck.everything(), untouched.everything()
    assert [part for part in ours if not same(ours[part], theirs[part])] == []


def main() -> None:
    """DDP, or FSDP2, of which Accelerate knows with devices only: it is told of the gloo ranks."""
    from accelerate.state import PartialState
    from leave import leave

    kind, run = sys.argv[1], Path(sys.argv[2])
    with contextlib.ExitStack() as patched:
        if kind == "fsdp2":
            told = ("gloo", accelerate.utils.DistributedType.MULTI_GPU)
            cpu = torch.device("cpu")
            patched.enter_context(mock.patch.object(PartialState, "_prepare_backend", return_value=told))
            patched.enter_context(mock.patch.object(PartialState, "set_device", lambda on: setattr(on, "device", cpu)))
        compare(run, Sharded if kind == "fsdp2" else Parts)
    leave()


if __name__ == "__main__":
    main()
