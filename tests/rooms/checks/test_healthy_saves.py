"""Healthy saves of many kinds of training, put together by chance: none of them is anything but good."""

from __future__ import annotations

import argparse
import collections
import copy
import math
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.format_files import torch_bytes
from support.judged_files import findings_of
from torch import nn

from ckptguard.values.verdict import Severity

NAN, INF = math.nan, math.inf
COUNT = 2000 if os.environ.get("CKPTGUARD_CAMPAIGN") == "full" else 240
_PARTS = 8


class Block(nn.Module):
    """Attention with a mask, a residual gain and a convolution that begin at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.zero_conv = nn.Conv1d(width, width, 1)
        nn.init.zeros_(self.zero_conv.weight)
        self.gain = nn.Parameter(torch.zeros(width))
        self.register_buffer("causal_mask", torch.full((6, 6), -INF).triu(1))
        self.register_buffer("empty", torch.zeros(0, width))


class Lora(nn.Module):
    """A frozen layer with an adapter whose second half begins at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_A = nn.Linear(width, 2, bias=False)
        self.lora_B = nn.Linear(2, width, bias=False)
        nn.init.zeros_(self.lora_B.weight)


def model(rng: random.Random) -> nn.Module:
    """A small model of some of these layers."""
    width = rng.choice((4, 8))
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(width, width),
        lambda: nn.BatchNorm1d(width),
        lambda: nn.LayerNorm(width),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(width, width)),
        lambda: nn.LSTM(width, width),
        lambda: nn.Embedding(5, width, padding_idx=0),
        lambda: Block(width),
        lambda: Lora(width),
        lambda: nn.PReLU(),
    ]
    made = nn.Sequential(nn.Linear(width, width), *(make() for make in rng.sample(kinds, rng.randint(1, 4))))
    if rng.random() < 0.3:
        made[0].requires_grad_(requires_grad=False)
    return made.to(rng.choice((torch.float32, torch.float32, torch.float64)))


def optimizer(rng: random.Random, net: nn.Module) -> dict[str, object]:
    """The state of an optimizer after some updates, or before any."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    makers: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: torch.optim.Adam(parameters, lr=1e-3, amsgrad=rng.random() < 0.5),
        lambda: torch.optim.AdamW(parameters, lr=torch.tensor(1e-3), foreach=False),
        lambda: torch.optim.SGD(parameters, lr=0.1, momentum=rng.choice((0, 0.9)), nesterov=False),
        lambda: torch.optim.RMSprop(parameters, centered=True, momentum=0.5),
        lambda: torch.optim.Adagrad(parameters),
        lambda: torch.optim.Adadelta(parameters),
        lambda: torch.optim.LBFGS(parameters),
        lambda: torch.optim.RAdam(parameters),
        lambda: torch.optim.Rprop(parameters),
    ]
    made = rng.choice(makers)()
    for _ in range(rng.choice((0, 1, 2))):

        def loss() -> torch.Tensor:
            made.zero_grad()
            found = sum((p.square().mean() for p in parameters), torch.zeros((), dtype=parameters[0].dtype))
            found.backward()
            return found

        made.step(loss)
    state = copy.deepcopy(made.state_dict())
    for group in state["param_groups"]:
        group |= rng.choice(
            (
                {},
                {"d": 1e-6, "d0": 1e-6, "d_max": 1e-6, "growth_rate": INF, "k": 3},  # Prodigy
                {"train_mode": True, "weight_sum": 0.0, "lr_max": -1.0, "scheduled_lr": 0.0},  # schedule-free
                {"max_grad_norm": INF, "initial_lr": 0.1},
            )
        )
    if rng.random() < 0.2:  # 8-bit
        for one in state["state"].values():
            one["state1"], one["absmax1"] = torch.zeros(64, dtype=torch.uint8), torch.zeros(1)
            one["qmap1"] = torch.linspace(-1, 1, 256)
    return state  # type: ignore[no-any-return]


def scheduler(rng: random.Random) -> dict[str, object]:
    """The state of a scheduler; of a plateau before its first metric, too."""
    net = nn.Linear(2, 2)
    steps = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return rng.choice(  # type: ignore[no-any-return]
        (
            torch.optim.lr_scheduler.ReduceLROnPlateau(steps).state_dict(),
            torch.optim.lr_scheduler.OneCycleLR(steps, 0.1, 10).state_dict(),
            torch.optim.lr_scheduler.StepLR(steps, 2).state_dict(),
            {"best": torch.tensor(INF), "num_bad_epochs": 0, "_last_lr": [torch.tensor(0.1)]},
        )
    )


def callbacks(rng: random.Random, net: nn.Module) -> dict[str, object]:
    """What Lightning's callbacks keep; an average of the weights beside scores that are not finite."""
    found: dict[str, object] = {
        "ModelCheckpoint{'monitor': 'v_loss', 'mode': 'min'}": {
            "best_model_score": torch.tensor(INF),
            "best_k_models": {"a.ckpt": torch.tensor(NAN)},
            "kth_value": torch.tensor(INF),
            "best_model_path": "",
        },
        "EarlyStopping{'monitor': 'v_loss'}": {"best_score": torch.tensor(INF), "wait_count": 0, "patience": 3},
    }
    if rng.random() < 0.5:
        found["EMACallback"] = {"shadow": net.state_dict(), "decay": 0.99}
    return found


def history(rng: random.Random) -> object:
    """Losses and scores, with gaps."""
    losses = [1.0, NAN, 0.5, INF]
    return rng.choice(
        (
            losses,
            torch.tensor(losses),
            np.array(losses),
            {"train": losses, "eval": torch.tensor(losses), "best": np.float32(NAN)},
            [{"loss": NAN, "step": 3}] * 3,
            losses * 100,
        )
    )


def replay(rng: random.Random) -> object:
    """What an agent has seen, short or long, in the forms that people keep it in."""
    size = rng.choice((3, 400, 40_000))
    seen = np.linspace(-1, 1, size, dtype=rng.choice((np.float16, np.float32, np.float64)))
    return rng.choice(
        (
            seen,
            seen.tobytes(),
            bytearray(seen.tobytes()),
            {"obs": seen.reshape(-1, 1), "done": np.zeros(size, bool), "pos": 7},
            collections.deque(((seen, 1, 0.5, seen[::-1].copy(), False) for _ in range(3)), maxlen=9),
        )
    )


def save(rng: random.Random) -> dict[str, object]:
    """One save of a training of any kind."""
    net = model(rng)
    weights = net.state_dict()
    if rng.random() < 0.2:
        weights = collections.OrderedDict((k, v.half() if v.is_floating_point() else v) for k, v in weights.items())
    name = rng.choice(("model", "state_dict", "net", "module", "generator", "actor", "encoder"))
    found: dict[str, object] = {name: weights, "epoch": 3, "global_step": 300}
    parts: dict[str, Callable[[], object]] = {
        rng.choice(("optimizer", "opt", "optim_g", "actor_optimizer")): lambda: optimizer(rng, net),
        rng.choice(("scheduler", "lr_schedulers", "sched_g")): lambda: rng.choice((list, lambda one: one))(  # type: ignore[operator]
            [scheduler(rng)]
        ),
        "scaler": lambda: rng.choice(
            ({}, {"scale": rng.choice((65536.0, torch.tensor(65536.0))), "growth_factor": 2.0, "backoff_factor": 0.5})
        ),
        "callbacks": lambda: callbacks(rng, net),
        "loops": lambda: {"fit_loop": {"state_dict": {}, "best": INF}},
        rng.choice(("history", "losses", "metrics", "log_history", "trainer_log")): lambda: history(rng),
        rng.choice(("best_score", "best_loss", "best")): lambda: rng.choice((INF, torch.tensor(INF), np.float64(NAN))),
        rng.choice(("ema", "model_ema", "teacher", "best_model")): lambda: net.state_dict(),
        "log_alpha": lambda: rng.choice((torch.zeros(1, requires_grad=True), nn.Parameter(torch.tensor(0.0)))),
        "critic": lambda: model(rng).state_dict(),
        rng.choice(("rng_state", "random")): lambda: {"torch": torch.get_rng_state(), "numpy": np.random.get_state()},
        rng.choice(("args", "hyper_parameters", "config")): lambda: rng.choice(
            ({"clip": INF, "target": NAN, "lr": 0.1}, argparse.Namespace(lr=0.1, clip=INF))
        ),
        rng.choice(("replay_buffer", "memory", "dataset")): lambda: replay(rng),
        "sampler": lambda: {"weights": torch.ones(5), "position": 7},
        "trainer": lambda: {"best_loss": rng.choice((INF, torch.tensor(INF))), "swa": net.state_dict(), "patience": 3},
        "quantised": lambda: {
            "w": torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.qint8),
            "packed": torch.zeros(4, 2, dtype=torch.uint8),
            "scales": torch.ones(4),
        },
    }
    for key in rng.sample(list(parts), rng.randint(0, 6)):
        found[key] = parts[key]()
    return found


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(_PARTS))
def test_no_alarm_about_a_healthy_save(tmp_path: Path, part: int) -> None:
    """Neither an error nor a doubt about any of them, in torch's two formats and every protocol."""
    told = []
    for number in range(part, COUNT, _PARTS):
        rng = random.Random(number)
        torch.manual_seed(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = torch_bytes(
                save(rng), _use_new_zipfile_serialization=number % 5 != 0, pickle_protocol=rng.choice((2, 2, 3, 4, 5))
            )
        for finding in findings_of(tmp_path, {"net-5.pt": data}):
            if finding.severity in (Severity.ERROR, Severity.SICKNESS):
                told.append((number, finding.tensor, finding.message))
    assert told == []
