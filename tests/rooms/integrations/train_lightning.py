"""``train_lightning.py alone|ranks FOLDER``: Lightning with the guard: going back, deleting, looking.

With ranks Lightning starts the second process by itself, which runs all of this again.
"""

from __future__ import annotations

import errno
import functools
import logging
import math
import os
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lightning
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from support.tiny_trainer import same
from torch.distributed.fsdp import FSDPModule, fully_shard

import ckptguard.integrations
from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.errors import NoKnownGoodError, SettingsError, SickTrainingError, StorageFullError
from ckptguard.records.manifests import read_manifest, sealed_generations
from ckptguard.storage.local import writes
from ckptguard.values.manifest import Manifest
from ckptguard.values.settings import Settings

QUICK = Settings(settle=0.0)
fit = ckptguard.integrations.lightning.fit


class Module(lightning.LightningModule):
    """A tiny module with dropout and batch statistics; after some updates, once each, a weight of the last rank
    overflows."""

    def __init__(self, *strikes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )
        self.strikes = set(strikes)
        self.seen: list[tuple[int, int]] = []

    def on_train_start(self):
        if not self.trainer.global_step:
            torch.manual_seed(10 + self.global_rank)

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx))
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step in self.strikes and self.global_rank == self.trainer.world_size - 1:
            self.strikes.discard(self.trainer.global_step)
            with torch.no_grad():
                self.net[0].weight.mul_(1e38).mul_(1e38)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(huge: int | None = None, *, ranks: int = 1):
    """Five batches an epoch."""
    made = torch.randn(20 * ranks, 4, generator=torch.Generator().manual_seed(1))
    if huge is not None:
        made[4 * huge] = 3e38
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(made), batch_size=4)


def trainer(folder: Path, *, guarded: bool = True, keep: int = 1, **more) -> lightning.Trainer:
    """Saves at the end of each of four epochs, and keeps the newest."""
    lightning.seed_everything(0)
    io = [ckptguard.integrations.lightning.GuardedIO(folder, settings=QUICK)] if guarded else None
    more["strategy"] = more["strategy"]() if callable(more.get("strategy")) else more.get("strategy", "auto")
    saver = ModelCheckpoint(folder, save_top_k=keep, monitor="step", mode="max", every_n_epochs=1)
    return lightning.Trainer(
        **({"max_epochs": 4, "devices": 1} | more),
        accelerator="cpu",
        logger=False,
        callbacks=[saver],
        plugins=io,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


class Sharded(Module):
    """The same over ranks, by FSDP2; of batch statistics Lightning would save only the first rank's."""

    def __init__(self, *strikes: int) -> None:
        super().__init__(*strikes)
        self.net[1] = torch.nn.LayerNorm(16)

    def configure_model(self):
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def everything(made: lightning.Trainer, module: Module):
    moments = [value for state in made.optimizers[0].state.values() for value in state.values()]
    tensors = [getattr(value, "_local_tensor", value) for value in (*module.state_dict().values(), *moments)]
    schedule = made.lr_scheduler_configs[0].scheduler.state_dict()
    return [tensors, schedule, made.global_step, made.current_epoch]


def delete(root: Path) -> None:
    """What a ModelCheckpoint would ask of the plugin, with saves between that are no good; and there is no daemon."""
    io = ckptguard.integrations.lightning.GuardedIO(root, settings=QUICK)
    paths = [root / f"epoch=0-step={step}.ckpt" for step in range(5)]

    def save(step: int, value: float) -> None:
        weight = torch.full((300,), value) * 1e38
        io.save_checkpoint({"state_dict": {"weight": weight}, "global_step": step}, str(paths[step]))

    save(1, 1e-38)
    assert [m.digest_origin for m in manifests(io)] == ["writer"]
    save(2, 1e38)
    io.remove_checkpoint(str(paths[1]))
    io.wait()
    assert paths[1].exists()
    io.remove_checkpoint(str(paths[2]))
    with mock.patch.object(writes, "os", SimpleNamespace(**{**vars(os), "pwrite": lying_write})):
        save(3, 2e-38)
    io.remove_checkpoint(str(paths[1]))
    io.wait()
    assert paths[1].exists()
    assert not paths[2].exists()
    save(4, 3e-38)
    with pytest.raises(StorageFullError, match="no space left"), mock.patch.object(os, "fsync", side_effect=full()):
        save(0, 4e-38)
    assert not [path for path in root.iterdir() if "step=0" in path.name]
    io.remove_checkpoint(str(paths[4]))
    io.teardown()
    assert not paths[1].exists()
    assert paths[4].exists()
    assert torch.load(paths[4])["global_step"] == 4
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        save(0, 4e-38)  # as at the end of the process
    assert torch.load(paths[0])["global_step"] == 0
    odd = os.fsdecode(b"\xff.ckpt")  # a name that no record can have
    io.save_checkpoint({"global_step": 5}, str(root / odd))
    assert torch.load(root / odd)["global_step"] == 5
    io.teardown()


def manifests(io) -> list[Manifest]:
    """Of everything that is sealed."""
    run, series = io.open_run(), io.series
    found = [read_manifest(run, id) for id in sealed_generations(run, series)]
    return [manifest for manifest in found if manifest is not None]


def full() -> OSError:
    """What a full disk raises."""
    return OSError(errno.ENOSPC, "No space left on device")


def lying_write(descriptor: int, data, offset: int) -> int:
    """A disk that keeps another byte than it was given: digests of what was handed over tell."""
    kept = bytearray(data)
    kept[len(kept) // 2] ^= 1
    return os.pwrite(descriptor, kept, offset)


class Unused(Module):
    """A row that no batch uses turns NaN: no loss shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(4, 2)

    def validation_step(self, batch, batch_idx):
        self.log("measured", self.net(batch[0]).square().mean())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step == 6:
            self.rows.weight.data[3].mul_(1e38).mul_(1e38)


def validate(root: Path) -> None:
    """ModelCheckpoint saves while Lightning validates, in the midst of an epoch."""
    guard = ckptguard.integrations.lightning.GuardCallback(settings=QUICK)
    saver = ModelCheckpoint(root, monitor="measured", save_top_k=-1, filename="{epoch}-{step}")
    made = trainer(root, val_check_interval=2, num_sanity_val_steps=0)
    made.callbacks = [saver, guard]
    with pytest.raises(SickTrainingError, match=r"rows\.weight"):
        made.fit(Unused(), data(), data())
    states = [torch.load(path, weights_only=False)["state_dict"] for path in root.glob("*.ckpt")]
    assert len(states) >= 2
    assert all(value.isfinite().all() for state in states for value in state.values())


def replay(root: Path, kind: type[Module] = Module, **more) -> None:
    """A run that is struck ends like one that is not, and Lightning has deleted what it was told to."""
    data_of_all = data(ranks=more.get("devices", 1))
    untouched, module = trainer(root / "untouched", guarded=False, **more), kind()
    untouched.fit(module, data_of_all)
    struck, other = trainer(root / "struck", **more), kind(13, 17)
    fit(struck, other, data_of_all, policy=RollbackPolicy(skip=False, near=0), save_every=5)
    assert len(other.seen) > len(module.seen) == 20, other.seen
    assert same(everything(struck, other), everything(untouched, module))
    struck.strategy.barrier()  # the first rank deletes
    left = sorted(path.name for path in (root / "struck").glob("*.ckpt"))  # Lightning spares what it resumed from
    assert left == ["epoch=1-step=10.ckpt", "epoch=2-step=15.ckpt", "epoch=3-step=20.ckpt"], left


class Rates(Callback):
    """The learning rate of each update; of one that is made again the last."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen[trainer.global_step + 1] = trainer.optimizers[0].param_groups[0]["lr"]


def cut_the_rate(root: Path) -> None:
    """Two incidents close together halve the learning rate, until two updates were healthy."""
    made, rates = trainer(root, keep=-1), Rates()
    made.callbacks.append(rates)
    fit(made, Module(13, 14), data(), policy=RollbackPolicy(skip=False, lr_back=2), save_every=5)
    assert made.global_step == 20, made.global_step
    assert all(rates.seen[step] == 0.005 for step in range(6, 18)), rates.seen  # 15 is the last one under suspicion
    assert all(rates.seen[step] == 0.01 for step in range(18, 21)), rates.seen


def find_the_run(root: Path) -> None:
    """Checkpoints that the user sends nowhere are guarded: they go to the run, unless they go into it already. Those
    with a folder of their own stay there."""
    for run, home, kept in (
        ("run", "home", "."),
        ("run", "run/below", "below/checkpoints"),
        ("run", "run", "checkpoints"),
    ):
        place = root / home.replace("/", "-") / run
        made = lightning.Trainer(
            plugins=[ckptguard.integrations.lightning.GuardedIO(place, settings=QUICK)],
            callbacks=[aside := ModelCheckpoint(root / "aside")],
            default_root_dir=place.parent / home,
            max_epochs=1,
            devices=1,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        made.callbacks.append(ModelCheckpoint(filename="mine", enable_version_counter=False))
        fit(made, Module(), data())
        assert (place / kept / "mine.ckpt").is_file(), sorted(place.rglob("*"))
        assert aside.dirpath == str(root / "aside")


def turn_sick_at_once(root: Path) -> None:
    """Before the first save there is nothing to go back to: one sentence says so, and the Trainer is as it was."""
    made, module = trainer(root), Module(2)
    callbacks = list(made.callbacks)
    with pytest.raises(NoKnownGoodError, match=r"weight is not finite.*; nothing that was saved is good"):
        fit(made, module, data())
    assert made.callbacks == callbacks
    assert not {"training_step", "optimizer_step"} & set(vars(module))


class Losses(Callback):
    """What a callback of the user's sees of each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))


def leave_out(root: Path, kind: type[Module] = Module, **more) -> None:
    """A run resumes where another ended, and leaves out the batch that overflows; its momenta stay as they are."""
    ranks = more.get("devices", 1)
    harmed = trainer(root / "harmed", max_epochs=1, keep=-1, **more)
    fit(harmed, kind(), data(ranks=ranks), save_every=5)
    poisoned = trainer(root / "harmed", keep=-1, max_epochs=2, **more)
    module, losses = kind(), Losses()
    poisoned.callbacks.append(losses)
    fit(poisoned, module, data(huge=2 * ranks, ranks=ranks))
    assert 0.0 not in losses.seen
    assert any(map(math.isnan, losses.seen))
    assert poisoned.global_step == 10, poisoned.global_step
    assert module.seen[-1] == (1, 4), module.seen
    assert all(value.isfinite().all() for value in module.state_dict().values())
    [first, *_] = poisoned.optimizers[0].state.values()
    assert first["step"] < 10, first["step"]


def main() -> None:
    """As told; AssertionError if it is not as it must be."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    kind, root = sys.argv[1], Path(sys.argv[2])
    if kind == "ranks":
        from leave import leave

        fsdp = functools.partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
        replay(root / "ddp", devices=2, strategy="ddp")
        leave_out(root / "ddp", devices=2, strategy="ddp")
        replay(root / "fsdp", Sharded, devices=2, strategy=fsdp)
        leave_out(root / "fsdp", Sharded, devices=2, strategy=fsdp)
        leave()
    delete(root / "deleting")
    validate(root / "validating")
    replay(root / "alone")
    leave_out(root / "alone")
    turn_sick_at_once(root / "unsaved")
    find_the_run(root / "default")
    cut_the_rate(root / "cut")
    with pytest.raises(SettingsError, match="GuardedIO"):
        fit(trainer(root / "bare", guarded=False), Module(), data())
    with pytest.raises(SettingsError, match="spawned"):
        fit(trainer(root / "spawned", devices=2, strategy="ddp_fork"), Module(), data())


if __name__ == "__main__":
    main()
