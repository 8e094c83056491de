"""Trainings of several ranks that are struck by faults, watched from every rank. Run by `rank_processes`.

What each rank saw of each training is appended to a file of its own, for a rank may be killed before it could answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.runs import QUICK
from support.training_faults import SAVE_EVERY, TOTAL, Scaler, damage, saves
from support.views import look
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import ckptguard
from ckptguard.records.pins import pinned_generations
from ckptguard.records.run import open_run
from ckptguard.runs.history import load_history
from ckptguard.training.ranks import GlooRanks
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import Verification, verify_checkpoint

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One training, and what happens to it at the update `at`, mostly on one rank. `kill_after`: the rank is killed
    so many exchanges, flushes or renames later. `held`: the rank's save is in flight then, and ends when the rollback
    waits for it ("waited for") or after that gave it up ("given up")."""

    run: str
    seed: int
    kind: str = "ddp"
    fault: str = "calm"
    at: int = 0
    rank: int = 0
    around: str = "calm"
    check_every: int = 1
    tells: bool = True
    kill_after: int = 0
    held: str = ""
    resumes: bool = False


def train_all(folder: str, jobs: list[dict[str, Any]]) -> None:
    """The trainings, one after the other, on all ranks."""
    for told in jobs:
        seen = Training(Path(folder), Job(**told)).train()
        with open(Path(folder) / f"{told['run']}.{dist.get_rank()}.seen", "a", encoding="utf-8") as file:
            file.write(json.dumps(seen) + "\n")


class Training:
    """One rank's part of a training."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.job, self.run, self.rank = job, folder / job.run, dist.get_rank()
        self.struck_here = self.rank == job.rank % dist.get_world_size()
        self.saved_path = folder / f"{job.run}.saved"
        self.saved: dict[int, set[str]] = {}
        if self.saved_path.exists():
            for line in self.saved_path.read_text().splitlines():
                step, digest = line.split()
                self.saved.setdefault(int(step), set()).add(digest)
        self.wrong: list[str] = []
        self.made, self.loads = 0, 0
        self.let_go = threading.Event()
        torch.manual_seed(job.seed + job.resumes)
        model: nn.Module = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4))
        if job.kind == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        else:
            model = nn.parallel.DistributedDataParallel(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.scaler = Scaler() if job.fault in ("scale", "two skips") else None
        data = torch.randn(12 * 8, 6, generator=torch.Generator().manual_seed(job.seed))
        self.loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8)

    def train(self) -> dict[str, Any]:
        """Train to the end; what this rank saw."""
        job, seen = self.job, {"steps": []}
        options: dict[str, Any] = {}
        if job.kind == "files":
            options |= {"save": self.save, "load": self.load}
        spikes = ckptguard.Spikes(window=8, warm_up=8, sigma=10, factor=50, in_a_row=2)
        try:
            with Undone(os, "fsync", "link", "rename"), Undone(GlooRanks, "_talk"):
                guard = ckptguard.TrainingGuard(
                    self.run,
                    model=self.model,
                    optimizer=self.optimizer,
                    scaler=self.scaler,
                    daemon="off",
                    settings=QUICK,
                    saving=ckptguard.Saving(blocking=not job.held),
                    deadlines=ckptguard.Deadlines(daemon=0.3 if job.held == "given up" else 20.0, ranks=30),
                    policy=ckptguard.RollbackPolicy(spikes=spikes, check_every=job.check_every),
                    **options,
                )
                self.watch(guard)
                for step, (x,) in guard.steps(self.loader, total=TOTAL, save_every=SAVE_EVERY):
                    self.made += 1
                    seen["steps"].append(step)
                    self.update(guard, x)
                guard.close()
            seen["digest"], finite = self.digest()
            if not finite:
                self.wrong.append("it ended with numbers that are not finite")
        except ckptguard.CkptguardError as error:
            seen |= {"error": error.kind, "message": error.message, "report": getattr(error, "report", None)}
        except RuntimeError as error:  # torch's own words for a peer that is gone
            seen |= {"error": "torch", "message": str(error)}
        finally:
            seen["full"] = resource.getrlimit(resource.RLIMIT_FSIZE)[0] == 0
            self.disk_full(False)
            self.let_go.set()
        return seen | {"wrong": self.wrong, "loads": self.loads, "step": guard.step}

    def update(self, guard: ckptguard.TrainingGuard, x: torch.Tensor) -> None:
        """One update, with whatever strikes in it."""
        job, model = self.job, self.model
        strikes = self.made >= job.at if job.fault == "lasting" else self.made == job.at
        if job.fault in ("scale", "two skips"):
            strikes = job.at <= self.made < job.at + {"scale": 5, "two skips": 2}[job.fault]
        self.surround(guard, strikes and self.made == job.at)
        here = strikes and self.struck_here
        if here and job.fault == "input":
            x = x.clone()
            x[0, 0] = torch.nan
        model.train()
        loss = model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            if here and job.fault in ("gradient", "lasting"):
                poison([p.grad for p in model.parameters()])
            norm = nn.utils.get_total_norm([local(p.grad) for p in model.parameters()])
            if strikes and self.scaler is not None:
                self.scaler.scale /= 2
                norm = torch.tensor(torch.inf)
            else:
                self.optimizer.step()
            if here and job.fault == "weight":
                poison(model.parameters())
            if here and job.fault == "buffer":
                poison([b for name, b in model.named_buffers() if name.endswith("running_mean")])
            if here and job.fault == "optimizer":
                poison([state["exp_avg"] for state in self.optimizer.state.values()])
            if strikes and job.fault == "spike":  # gradients are shared: it is one of all ranks
                for parameter in model.parameters():
                    local(parameter).mul_(1e5)
            if job.fault == "warm-up":
                self.optimizer.param_groups[0]["lr"] = 0.0 if self.made < job.at else 0.01
        if strikes and job.fault == "masked" and self.struck_here:
            loss = nn.functional.cross_entropy(torch.zeros(2, 3), torch.full((2,), -100))
        if here and job.fault == "asked":
            guard.rollback("asked on one rank")
        if job.tells or job.fault in ("spike", "scale", "masked", "two skips"):
            guard.observe(loss=loss, grad_norm=norm)

    def surround(self, guard: ckptguard.TrainingGuard, strikes: bool) -> None:
        """What happens beside the fault."""
        job = self.job
        if job.around in ("disk full", "disk full later"):
            first, last = (max(2, job.at - 6), job.at - 2) if job.around == "disk full" else (job.at + 1, job.at + 2)
            self.disk_full(self.struck_here and first <= self.made <= last)
        if job.held and self.struck_here and self.made == job.at - 1:
            self.hold()
        if self.made == job.at + 3:
            self.let_go.set()
        if strikes and job.around in ("damaged", "shard", "rotten"):
            guard._saving.drain(20.0)
            dist.barrier()
            if self.rank == 0:
                self.damage()
            dist.barrier()
        if strikes and job.kill_after and self.struck_here:
            self.arm()

    def damage(self) -> None:
        """Damage the newest checkpoints, or only one rank's shard of the newest, or an old one."""
        generator, folders = random.Random(self.job.seed), saves(self.run)
        if self.job.around == "damaged":
            print(damage(self.run, generator, generator.randrange(1, 4)))
            return
        shards = sorted((folders[-1] if self.job.around == "shard" else folders[0]).glob("*.distcp"))
        if len(folders) > 1 and shards:
            content = bytearray((shard := generator.choice(shards)).read_bytes())
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
            shard.write_bytes(content)

    def disk_full(self, full: bool) -> None:
        """Have every write of this process to a file fail, or no longer."""
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else hard, hard))

    def hold(self) -> None:
        """Have the next save of this rank stop at its first flush."""
        real, thread = os.fsync, f"ckptguard-save-{self.job.at - 1}"

        def fsync(descriptor: int) -> None:
            if threading.current_thread().name == thread:
                assert self.let_go.wait(60)
            real(descriptor)

        os.fsync = fsync

    def arm(self) -> None:
        """Be killed at one of the next points at which a peer, the disk or a reader could notice."""
        left = [self.job.kill_after]

        def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return call

        for module, name in ((os, "fsync"), (os, "link"), (os, "rename"), (GlooRanks, "_talk")):
            setattr(module, name, deadly(getattr(module, name)))

    def watch(self, guard: ckptguard.TrainingGuard) -> None:
        """Judge every save and load of the guard."""
        progress, store, saving = guard._progress, guard._store, guard._saving
        real_extra, real_arrive, real_read, real_drain = progress.extra, progress.arrive, store.read, saving.drain

        def extra() -> dict[str, Any]:
            digest, finite = self.digest()
            if finite:
                self.saved.setdefault(progress.current, set()).add(digest)
                if self.rank == 0:
                    with RoomMeanwhile(), open(self.saved_path, "a", encoding="utf-8") as file:
                        file.write(f"{progress.current} {digest}\n")
            return real_extra()

        def read(manifest: Any) -> Any:
            run = open_run(guard.run)
            verdict = load_history(run).verdict(manifest.id)
            full = resource.getrlimit(resource.RLIMIT_FSIZE)[0] == 0
            if not full and manifest.id not in pinned_generations(run):
                self.wrong.append(f"{manifest.path} is loaded, and nothing pins it")
            if verdict is None and full:
                checkpoint = look(run).checkpoint(manifest.path)
                verdict = verify_checkpoint(look(run), checkpoint, Verification(md5=False, record=False))
            if verdict is None or verdict.outcome is not Outcome.GOOD:
                self.wrong.append(f"{manifest.path} is loaded, and it is {verdict and verdict.outcome}")
            return real_read(manifest)

        def arrive(step: int, extra: dict[str, Any], **options: Any) -> None:
            self.loads += 1
            digest, finite = self.digest()
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, [step, digest])
            if not finite or digest not in self.saved.get(step, ()):
                self.wrong.append(f"what was loaded as step {step} is finite: {finite}, and was never saved there")
            if any(other != [step, digest] for other in told):
                self.wrong.append(f"the ranks do not agree: {told}")
            real_arrive(step, extra, **options)

        def drain(seconds: float | None = None) -> None:
            if seconds is not None and self.job.held == "waited for":
                self.let_go.set()
            real_drain(seconds)

        progress.extra, progress.arrive, store.read, saving.drain = extra, arrive, read, drain

    def digest(self) -> tuple[str, bool]:
        """The whole state in one short text, whatever the sharding; whether it is finite. To be asked by all."""
        tensors = dict(get_model_state_dict(self.model, options=_WHOLE))
        stepped = torch.tensor(bool(self.optimizer.state))
        dist.all_reduce(stepped, op=dist.ReduceOp.MAX)
        if stepped:
            state = get_optimizer_state_dict(self.model, self.optimizer, options=_WHOLE)["state"]
            tensors |= {f"{name}.{key}": value for name, own in state.items() for key, value in own.items()}
        hasher, finite = hashlib.sha256(), True
        for name, tensor in sorted(tensors.items()):
            finite &= bool(tensor.isfinite().all())
            hasher.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
        return hasher.hexdigest(), finite

    def save(self, path: str, step: int) -> None:
        """The user's own file, written by rank 0."""
        if self.rank == 0:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path: str) -> None:
        """The same, read by all."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Undone:
    """Attributes that have their old values again afterwards."""

    def __init__(self, owner: Any, *names: str) -> None:
        self._owner, self._values = owner, {name: getattr(owner, name) for name in names}

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for name, value in self._values.items():
            setattr(self._owner, name, value)


class RoomMeanwhile:
    """Files can be written meanwhile."""

    def __enter__(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._limits[1], self._limits[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


def local(tensor: Any) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def poison(tensors: Any) -> None:
    """NaN in the first tensor of which this rank holds something."""
    held = next(local(t) for t in tensors if local(t).numel())
    held.view(-1)[0] = torch.nan
