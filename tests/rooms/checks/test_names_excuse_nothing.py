"""What a container is called excuses nothing, and a number means the same in whatever type it is stored.

All names and all kinds of value are paired. Whether a file holds something that is not finite is asked of torch.load.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.format_files import torch_bytes
from support.judged_files import findings_of, outcome_of

from ckptguard.values.verdict import Outcome

NAN, INF = math.nan, math.inf
_WORDS = (
    *("best", "callbacks", "args", "config", "metrics", "data", "sampler", "scaler", "scheduler", "amp", "numpy"),
    *("python", "rng", "hparams", "loops", "log_history", "dataset", "loader", "dataloader", "lr_scheduler", "sched"),
    *("module", "net", "network", "gen", "disc", "actor", "critic", "policy", "teacher", "student", "target", "avg"),
    *("swa", "shadow", "queue", "bank", "encoder", "decoder", "head", "backbone", "teacher_ema", "extra", "stats"),
    *("info", "meta", "history", "losses", "results", "eval", "test", "cache", "opt", "optim", "app", "state", "ckpt"),
)
NAMES = sorted(
    {*_WORDS, "best_model", "best_state_dict", "best_weights", "hyper_parameters", "random_state", "cuda_rng_state"}
    | {f"{word}_{tail}" for word in _WORDS[:34] for tail in ("state", "state_dict", "2")}
)[:157]


def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix with a number to spoil at its end."""
    return torch.linspace(-1, 1, 12).reshape(3, 4).to(dtype)


def spoilt(tensor: torch.Tensor, bad: float | None) -> torch.Tensor:
    """The same with its last number replaced."""
    if bad is not None:
        tensor.reshape(-1)[-1] = bad
    return tensor


def optimizer_state(lr: object = 0.1, moment: float | None = None, **more: object) -> dict[str, object]:
    """What an optimizer of one vector keeps."""
    state = {0: {"step": torch.tensor(3.0), "exp_avg": spoilt(torch.ones(4), moment)}}
    return {"state": state, "param_groups": [{"lr": lr, "betas": (0.9, 0.999), **more, "params": [0]}]}


def scaler(scale: object) -> dict[str, object]:
    """What a GradScaler keeps."""
    return {"scale": scale, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}


def layer(bad: float | None) -> torch.nn.Module:
    """A module that is saved as it is."""
    made = torch.nn.LayerNorm(4)
    with torch.no_grad():
        spoilt(made.weight, bad)
    return made


def number(make: Callable[[float], object], healthy: float) -> Callable[[float | None], object]:
    """A number in one of the types that it may have."""
    return lambda bad: make(healthy if bad is None else bad)


SCORES = ("callbacks", "loops")  # there each dict of the next level is on its own
# What is state wherever it lies, healthy or spoilt by a number.
STATE: dict[str, Callable[[float | None], object]] = {
    "a state dict": lambda bad: {"l.weight": spoilt(matrix(), bad), "l.bias": torch.ones(4)},
    "a vector beside a matrix": lambda bad: {"a": {"weight": matrix()}, "b": {"bias": spoilt(torch.ones(4), bad)}},
    "a number beside a matrix": lambda bad: {"weight": matrix(), "scale": spoilt(torch.tensor(1.0), bad)},
    "a matrix": lambda bad: spoilt(matrix(torch.bfloat16), bad),
    "an array": lambda bad: {"w": spoilt(matrix(), bad).numpy(), "b": np.ones(4, np.float32)},
    "an array's vector": lambda bad: {"w": matrix().numpy(), "b": spoilt(torch.ones(4), bad).numpy()},
    "a parameter of one number": lambda bad: torch.nn.Parameter(torch.tensor(1.0 if bad is None else bad)),
    "a vector that is learnt": lambda bad: spoilt(torch.ones(4), bad).requires_grad_(),
    "vectors that a module wrote": lambda bad: layer(bad).state_dict(),
    "a module": lambda bad: {"m": layer(bad)},
    "moments": lambda bad: optimizer_state(moment=bad),
    "a rate": lambda bad: optimizer_state(lr=0.1 if bad is None else bad),
}
TYPES: dict[str, Callable[[float], object]] = {
    "float": float,
    "numpy's scalar": np.float32,
    "array of one": lambda value: np.array([value]),
    "tensor": lambda value: torch.tensor(value),
    "tensor of one": lambda value: torch.tensor([value], dtype=torch.float64),
}
SERIES: dict[str, Callable[[float], object]] = {
    "list": lambda value: [0.5, value],
    "array": lambda value: np.array([0.5, value]),
    "tensor": lambda value: torch.tensor([0.5, value]),
}


def numbers_in(value: object) -> Iterator[torch.Tensor]:
    """All numbers of what torch.load returned."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, np.ndarray | np.floating):
        yield torch.as_tensor(value)
    elif isinstance(value, float):
        yield torch.tensor(value)
    elif isinstance(value, dict):
        for part in value.values():
            yield from numbers_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from numbers_in(part)


def is_finite(data: bytes) -> bool:
    """What torch says of a file."""
    loaded = torch.load(io.BytesIO(data), weights_only=False)
    return all(bool(torch.isfinite(one).all()) for one in numbers_in(loaded))


def beside_a_model(name: str, value: object) -> bytes:
    """A save of a healthy model, and of this under another name."""
    return torch_bytes({"model": {"w": matrix()}, name: value, "epoch": 3})


def test_there_are_as_many_names_as_the_law_asks() -> None:
    """All of them different."""
    assert len(NAMES) == 157


@pytest.mark.parametrize("kind", STATE)
def test_state_is_state_under_any_name(tmp_path: Path, kind: str) -> None:
    """Each kind of state under each name: bad with NaN or Inf in it, good without."""
    wrong = []
    apart = SCORES if kind == "a vector beside a matrix" else ()
    for index, name in enumerate(NAMES):
        if name in apart:
            continue
        for bad in ((NAN, INF, -INF)[index % 3], None)[: 2 if index % 8 == 0 else 1]:
            data = beside_a_model(name, STATE[kind](bad))
            expected = Outcome.GOOD if is_finite(data) else Outcome.BAD
            if outcome_of(tmp_path, data) is not expected:
                wrong.append((name, bad, expected))
    assert wrong == []


@pytest.mark.parametrize("bad", [NAN, INF, 0.0])
def test_a_scale_that_scales_nothing_is_bad_in_any_type(tmp_path: Path, bad: float) -> None:
    """NaN, infinity and zero; a healthy one is good."""
    for name in NAMES[::6]:
        for kind, make in TYPES.items():
            assert outcome_of(tmp_path, beside_a_model(name, scaler(make(bad)))) is Outcome.BAD, (name, kind)
            assert outcome_of(tmp_path, beside_a_model(name, scaler(make(65536.0)))) is Outcome.GOOD, (name, kind)


def test_a_number_means_the_same_in_any_type(tmp_path: Path) -> None:
    """A number alone, in a dict, of an optimizer, and a series of them: each name has one outcome for all types."""
    different = []
    for index, name in enumerate(NAMES[::3]):
        bad = NAN if index % 3 else INF
        forms: dict[str, Callable[[Callable[[float], object]], object]] = {
            "alone": lambda make, bad=bad: make(bad),
            "in a dict": lambda make, bad=bad: {"best": make(bad)},
            "a rate": lambda make, bad=bad: optimizer_state(lr=make(bad)),
            "Prodigy's d": lambda make, bad=bad: optimizer_state(d=make(bad)),
            "no limit": lambda make: optimizer_state(growth_rate=make(INF)),
        }
        for form, value in forms.items():
            found = {kind: outcome_of(tmp_path, beside_a_model(name, value(make))) for kind, make in TYPES.items()}
            expected = {"a rate": Outcome.BAD, "Prodigy's d": Outcome.BAD, "no limit": Outcome.GOOD}.get(form)
            if len(set(found.values())) != 1 or (expected and expected not in found.values()):
                different.append((name, form, bad, found))
        series = {kind: outcome_of(tmp_path, beside_a_model(name, make(NAN))) for kind, make in SERIES.items()}
        if len(set(series.values())) != 1:
            different.append((name, "series", NAN, series))
    assert different == []


@pytest.mark.parametrize("name", ["history", "losses", "metrics", "callbacks", "best_scores", "trainer"])
def test_a_history_of_scores_is_no_state(tmp_path: Path, name: str) -> None:
    """As a number, a list, an array or a tensor beside a model it is a notice; alone it is all there is."""
    for make in (*TYPES.values(), *SERIES.values()):
        for value in (make(NAN), {"train": make(NAN), "best": make(INF)}):
            assert outcome_of(tmp_path, beside_a_model(name, value)) is Outcome.GOOD, (name, value)
            assert outcome_of(tmp_path, torch_bytes({name: {"train": make(NAN)}})) is Outcome.BAD, (name, value)


def test_weights_under_a_name_for_something_else_are_weights(tmp_path: Path) -> None:
    """Where nothing else is saved: their zeros count, and a reference is kept of them."""
    healthy = torch_bytes({"best_model": {"l.weight": matrix()}})
    assert outcome_of(tmp_path, healthy) is Outcome.GOOD
    zeros = torch_bytes({"best_model": {"l.weight": torch.zeros(3, 4), "l.bias": torch.zeros(4)}})
    assert outcome_of(tmp_path, zeros) is not Outcome.GOOD


def test_what_the_other_files_hold_counts(tmp_path: Path) -> None:
    """A history in a file of its own is no state beside a model, and is all there is without one."""
    history = torch_bytes({"metrics": {"loss": torch.tensor([1.0, NAN])}})
    model = torch_bytes({"w": matrix()})
    both = findings_of(tmp_path, {"metrics.pt": history, "model.pt": model})
    assert [f for f in both if f.check == "finite" and f.severity == "error"] == []
    alone = findings_of(tmp_path, {"metrics.pt": history})
    assert [f.tensor for f in alone if f.check == "finite" and f.severity == "error"] == ["metrics.loss"]
