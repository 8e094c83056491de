"""Healthy trainings of many kinds in many layouts: no file is taken for one of another save.

What they have in common is that parts of a checkpoint rest, or go on at other times than the rest of it.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layouts import sharded
from support.runs import QUICK, save_file

from ckptguard.values.verdict import Severity
from ckptguard.verification.target import Selection, verify_target

GAP = 6  # updates between two saves
SAVES = 7


class EightBit(torch.optim.Optimizer):
    """Momentum in bytes, with its largest value as a float."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                before = (state["state1"].float() - 128) / 127 * state["absmax1"] if state else torch.zeros_like(p)
                moment = 0.9 * before + 0.1 * p.grad
                largest = moment.abs().max().reshape(1)
                state["state1"] = (moment / (largest + 1e-12) * 127 + 128).round().clamp(0, 255).to(torch.uint8)
                state["absmax1"] = largest
                p.data.add_(moment, alpha=-group["lr"])


class ScheduleFree(torch.optim.Optimizer):
    """An average in the weights, and what is trained in the state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "train_mode": True})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                z = state.setdefault("z", p.data.clone())
                squares = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                squares.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                z.addcdiv_(p.grad, squares.sqrt() + 1e-8, value=-group["lr"])
                p.data.lerp_(z, 1 / group["k"])


def _sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr)


def _momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def _amsgrad(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr, amsgrad=True)


OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "amsgrad": _amsgrad,
    "adagrad": torch.optim.Adagrad,
    "eight-bit": EightBit,
    "schedule-free": ScheduleFree,
}
KINDS = (
    *(
        "plain",
        *OPTIMIZERS,
        "bf16",
        "no-rate",
        "constant-rate",
        "ended-schedule",
        "schedule-by-epoch",
        "warm-up-then-own",
    ),
    *("frozen", "frozen-later", "two-models", "second-rests", "in-turns", "only-the-resting-is-saved", "adapter"),
    *("accumulates", "skips", "skips-with-average", "ends-as-average", "written-twice", "every-update", "rare-rows"),
    *("resumed", "replayed", "replayed-in-place", "one-name", "optimizer-anew", "files-that-rest", "no-optimizer"),
)


class Training:
    """A training of one kind. Which updates are made, and of what, depends on the seed alone."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.random = kind, random.Random(f"{kind} {seed}")
        torch.manual_seed(seed)
        self.models = [self._model() for _ in range(1 + (kind in _TWO))]
        self.base = self._model() if kind == "adapter" else None
        self.average = [copy.deepcopy(self.models[0])] if "average" in kind else []
        if kind == "frozen":
            self.models[0][0].requires_grad_(False)
        make = OPTIMIZERS.get(kind, torch.optim.AdamW)
        rate = 0.0 if kind == "no-rate" else 1e-2
        self.optimizers = [make([p for p in m.parameters() if p.requires_grad], rate) for m in self.models]
        end = {"constant-rate": 0.0, "ended-schedule": 0.1, "warm-up-then-own": 0.0}.get(kind, 0.005)
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda n: max(0.1, 1 - end * n)) for o in self.optimizers
        ]
        self.updates = self.seen = self.skipped = 0
        self.data = torch.Generator().manual_seed(seed)

    def _model(self) -> torch.nn.Sequential:
        layers: list[torch.nn.Module] = [torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)]
        if self.kind == "rare-rows":
            layers[0] = torch.nn.Embedding(64, 8)
        model = torch.nn.Sequential(*layers)
        return model.bfloat16() if self.kind == "bf16" else model

    def train(self, updates: int, *, skips: bool = False) -> None:
        """Train on. `skips`: the scaler finds an overflow each time."""
        for _ in range(updates):
            self.updates += 1
            self.skipped += skips
            for number, optimizer in enumerate(self.optimizers):
                if not self._rests(number):
                    self._update(number, optimizer, skips)
            for average in self.average:
                for p, q in zip(average.parameters(), self.models[0].parameters(), strict=True):
                    p.data.lerp_(q.data, 0.1)

    def _rests(self, number: int) -> bool:
        if self.kind == "in-turns":
            return (self.updates // GAP) % 2 == number
        late = {"second-rests": 3 * GAP, "only-the-resting-is-saved": 1}.get(self.kind)
        return late is not None and number == 1 and self.updates > late

    def _update(self, number: int, optimizer: torch.optim.Optimizer, skips: bool) -> None:
        model = self.models[number]
        if self.kind == "frozen-later" and self.updates > 3 * GAP:
            model[0].requires_grad_(False)
        if self.kind == "rare-rows":
            batch = torch.randint(0, 4, (4,), generator=self.data)
        else:
            batch = torch.randn(4, 8, generator=self.data).to(next(model.parameters()).dtype)
        model(batch).float().square().mean().backward()
        self.seen += 1
        if self.kind == "accumulates" and self.seen % 4:
            return
        if not skips:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if self.kind == "schedule-by-epoch" and self.updates % 20:
            return
        if self.kind == "warm-up-then-own" and self.updates > GAP:
            optimizer.param_groups[0]["lr"] *= 0.99
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a skipped update comes after the schedule's
            self.schedules[number].step()

    def snapshot(self) -> tuple[Any, ...]:
        """What a resume reads."""
        states = ([o.state_dict() for o in group] for group in (self.models, self.optimizers, self.schedules))
        return copy.deepcopy((*states, self.updates, self.seen, self.data.get_state()))

    def go_back(self, snapshot: tuple[Any, ...]) -> None:
        """Resume from a snapshot."""
        for group, states in zip((self.models, self.optimizers, self.schedules), snapshot[:3], strict=True):
            for one, state in zip(group, states, strict=True):
                one.load_state_dict(copy.deepcopy(state))
        self.updates, self.seen = snapshot[3:5]
        self.data.set_state(snapshot[5])


_TWO = ("two-models", "second-rests", "in-turns", "only-the-resting-is-saved")


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "lr_lambdas"}


class Files:
    """What a training saves, in one layout."""

    def __init__(self, training: Training, *, as_average: bool = False) -> None:
        t = self.training = training
        models = [*(t.average if as_average else t.models), *t.average]
        self.models = [{name: w.detach().clone() for name, w in m.state_dict().items()} for m in models]
        if t.base is not None:
            self.models.append(dict(t.base.state_dict()))
        saved = t.optimizers[t.kind == "only-the-resting-is-saved" :] if t.kind != "no-optimizer" else []
        self.optimizers = [o.state_dict() for o in saved]
        self.schedules = [_plain(s.state_dict()) for s in t.schedules]
        self.step = t.seen if t.kind == "accumulates" else t.updates

    def write(self, layout: str, place: Path) -> None:
        """Write all files anew."""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        if self.training.kind == "files-that-rest":
            (place / "args.json").write_text('{"global_step": 6, "step": 6, "epoch": 1}')
            torch.save({"global_step": 470000, "iteration": 6}, place / "base_info.pt")
            (place / "progress.json").write_text(json.dumps({"epoch": self.step // 20, "iteration": self.step // 20}))
        {"trainer": self._trainer, "accelerate": self._accelerate, "dcp": self._dcp, "zero": self._zero}[layout](place)

    def _numbered(self, place: Path, stem: str, suffix: str, states: list[Any]) -> None:
        for number, state in enumerate(states):
            path = place / f"{stem}{f'_{number}' if number else ''}{suffix}"
            save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)

    def _trainer(self, place: Path) -> None:
        self._numbered(place, "model", ".safetensors", self.models)
        self._numbered(place, "optimizer", ".pt", self.optimizers)
        self._numbered(place, "scheduler", ".pt", self.schedules)
        torch.save({"cpu": self.training.data.get_state()}, place / "rng_state.pth")
        torch.save({"scale": 0.5**self.training.skipped, "growth_factor": 2.0}, place / "scaler.pt")
        log = [{"step": self.step, "seconds": self.training.random.random()}]
        state = {"global_step": self.step, "epoch": self.step / 20, "log_history": log}
        (place / "trainer_state.json").write_text(json.dumps(state))

    def _accelerate(self, place: Path) -> None:
        self._numbered(place, "model", ".safetensors", self.models)
        self._numbered(place, "optimizer", ".bin", self.optimizers)
        self._numbered(place, "scheduler", ".bin", self.schedules)
        states = {"step": 0, "random_state": random.Random(self.step).getstate()}
        (place / "random_states_0.pkl").write_bytes(pickle.dumps(states))
        torch.save({"iteration": self.step, "epoch": self.step // 20}, place / "custom_checkpoint_0.pkl")

    def _named(self, number: int) -> dict[str, Any]:
        """The state of an optimizer by the names of its parameters, as tensors."""
        model = self.training.models[number]
        names = {id(p): name for name, p in model.named_parameters()}
        state = self.training.optimizers[number].state
        return {
            f"{names[id(p)]}.{key}": torch.as_tensor(value).clone()
            for p, own in state.items()
            for key, value in own.items()
        }

    def _dcp(self, place: Path) -> None:
        state: dict[str, Any] = {f"model{n}": model for n, model in enumerate(self.models)}
        first = len(self.training.optimizers) - len(self.optimizers)
        state |= {f"optimizer{n}": self._named(n) for n in range(first, len(self.training.optimizers))}
        sharded(place, {**state, "step": self.step})

    def _zero(self, place: Path) -> None:
        named = place.name.removeprefix("checkpoint-")  # Trainer gives both folders one number
        tag = place / f"global_step{named if named.isdigit() else self.step}"
        tag.mkdir()
        shared = {"skipped_steps": self.training.skipped, "global_steps": self.step, "dp_world_size": 2}
        config = {"mp_world_size": 1, "ds_config": {"zero_optimization": {"stage": 2}}, "ds_version": "0.19.8"}
        torch.save(
            {"module": self.models[0], "optimizer": None, **shared, **config}, tag / "mp_rank_00_model_states.pt"
        )
        state_of = self._named(0)
        kinds = {name.rpartition(".")[2] for name in state_of} - {"step"}
        flat = {k: torch.cat([v.float().flatten() for n, v in state_of.items() if n.endswith(f".{k}")]) for k in kinds}
        masters = torch.cat([w.float().flatten() for w in self.models[0].values()])
        steps = max((float(v) for n, v in state_of.items() if n.endswith(".step")), default=0.0)
        for rank in (0, 1):
            own = {kind: value.chunk(2)[rank].clone() for kind, value in flat.items()} | {"step": torch.tensor(steps)}
            base = {"state": {0: own}, "param_groups": [{"lr": 1e-2}]}
            inner = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [masters.chunk(2)[rank].clone()]}
            state = {"optimizer_state_dict": {"zero_stage": 2, **inner}, "ds_version": "0.19.8"}
            torch.save(state, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        (place / "latest").write_text(tag.name)


LAYOUTS = ("trainer", "accelerate", "dcp", "zero")
# Trainer steps its schedule with each update.
NEVER = {("warm-up-then-own", "trainer")}


def saves(kind: str, layout: str, seed: int, run: Path) -> Iterator[Path]:
    """Train and save, and yield each checkpoint that was written."""
    training = Training(kind, seed)
    gap = 1 if kind == "every-update" else GAP
    snapshots = []

    def save(name: str | None = None, *, as_average: bool = False) -> Path:
        place = run / (name or f"checkpoint-{training.updates}")
        Files(training, as_average=as_average).write(layout, place)
        return place

    one_name = "latest" if kind in ("one-name", "replayed-in-place") else None
    for number in range(SAVES):
        if kind in ("replayed", "replayed-in-place", "resumed") and number == 4:
            training.go_back(snapshots[1])
            if kind == "resumed":  # the batches are others
                training.data.manual_seed(seed + 1)
        if kind == "optimizer-anew" and number == 4:
            training.optimizers[0].state.clear()
        training.train(gap, skips=kind.startswith("skips") and number in (3, 5))
        snapshots.append(training.snapshot())
        yield save(one_name)
        if kind == "written-twice" and number in (2, 5):
            yield save(f"checkpoint-{training.updates + 1}")
    if kind == "ends-as-average":
        training.updates += training.random.randrange(2)  # a counter may rise before the last save
        yield save(f"checkpoint-{training.updates + 1}", as_average=True)


FULL = os.environ.get("CKPTGUARD_CAMPAIGN") == "full"
SEEDS = range(3) if FULL else range(1)


def alarms(kind: str, layout: str, seed: int, run: Path) -> tuple[int, list[str]]:
    """How many saves were verified, each after it was written, and what was said of them."""
    count, found = 0, []
    for place in saves(kind, layout, seed, run):
        step = place.name.removeprefix("checkpoint-")
        what = Selection(wait=0, step=int(step) if step.isdigit() else None)
        checked = verify_target(str(run), QUICK, what).checkpoints  # files beside a checkpoint may be some, too
        assert checked
        about = [f for one in checked for f in one.findings if f.check == "same-save"]
        heavy = [f.message for f in about if f.severity in (Severity.ERROR, Severity.SICKNESS)]
        count += 1
        found += [f"{kind} in {layout}, {place.name}: {message}" for message in heavy]
    return count, found


@pytest.mark.campaign
@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_no_healthy_save_has_a_file_of_another(kind, tmp_path):
    """In the short form each kind in one layout, in the full one in each."""
    layouts = LAYOUTS if FULL else [LAYOUTS[(KINDS.index(kind) + 1) % len(LAYOUTS)]]
    verified, found = 0, []
    for layout in (layout for layout in layouts if (kind, layout) not in NEVER):
        for seed in SEEDS:
            count, said = alarms(kind, layout, seed, tmp_path / "run")
            verified += count
            found += said
            shutil.rmtree(tmp_path / "run")
    assert verified >= 7
    assert found == []
