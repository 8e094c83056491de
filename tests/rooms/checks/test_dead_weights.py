"""Weights that were alive and hold nothing any more: a suspicion where they are many, and no alarm in healthy runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.evidence import T, evidence, found_by, manifest
from support.views import look

from ckptguard.checks import Evidence
from ckptguard.records.run import open_run
from ckptguard.values.verdict import Facts, Finding, Outcome, Severity
from ckptguard.verification.checkpoint import verify_checkpoint
from ckptguard.verification.user_decisions import clear

ALIVE = Facts(largest_magnitude=1.0)
DEAD = (
    st.just({"constant": True, "zeros": 1.0, "largest": 0.0, "rms": 0.0})
    | st.just({"constant": True, "zeros": 0.0})
    | st.floats(0.9, 1.0).map(lambda share: {"zeros": share})
)


def found(before: list[T], now: list[T], **more: object) -> list[Finding]:
    """What is said of dead weights."""
    known = {"reference_facts": ALIVE, **more}
    given: Evidence = evidence({"m.pt": now}, reference=manifest({"m.pt": before}), **known)  # type: ignore[arg-type]
    return [f for f in found_by("drift", given) if f.severity is not Severity.NOTICE]


@given(
    count=st.integers(1, 12),
    dying=st.lists(DEAD, min_size=1, max_size=12),
    role=st.sampled_from(["model", "ema"]),
    data=st.data(),
)
def test_many_dead_are_a_sickness_and_few_are_warnings(
    count: int, dying: list[dict[str, object]], role: str, data: st.DataObject
) -> None:
    """Two of them and a quarter of those that were alive; also where only an average is saved, as YOLO does."""
    before = [T(f"l{i}.weight", role=role) for i in range(count)]
    hit = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=len(dying)))
    how = dict(zip(sorted(hit), dying, strict=False))
    now = [t._replace(**how.get(i, {})) for i, t in enumerate(before)]  # type: ignore[arg-type]
    vectors = [T("norm.weight", role=role, shape=(16,)), T("norm.bias", role=role, shape=(16,))]
    reset = [t._replace(constant=True) for t in vectors]  # a fresh norm: says nothing
    told = found([*before, *vectors], [*now, *reset])
    if len(hit) > 1 and len(hit) * 4 >= count:
        assert [(f.severity, f.count, f.tensor) for f in told] == [(Severity.SICKNESS, len(hit), f"l{min(hit)}.weight")]
    else:
        assert [f.severity for f in told] == [Severity.WARNING] * len(hit)


@given(
    before=st.lists(st.floats(0.5, 1.0), min_size=2, max_size=8),
    now=st.floats(0.0, 1.0),
    constant=st.booleans(),
)
def test_what_was_pruned_or_constant_may_stay_so(before: list[float], now: float, constant: bool) -> None:
    """A sparse model stays sparse, or becomes more so; matrices that begin at zero are known from the reference."""
    old = [T(f"l{i}.weight", zeros=share) for i, share in enumerate(before)]
    known = Facts(largest_magnitude=1.0, constant=tuple(t.name for t in old) if constant else ())
    assert found(old, [t._replace(zeros=now, constant=constant) for t in old], reference_facts=known) == []


def test_where_nothing_can_be_said() -> None:
    """An earlier step than the reference; names that it has not; a reference without facts or magnitudes; an adapter
    whose half is set back to zero on purpose."""
    old = [T(f"l{i}.weight") for i in range(4)]
    dead = [t._replace(constant=True) for t in old]
    assert found(old, dead)
    assert found_by("drift", evidence({"m.pt": dead}, reference=manifest({"m.pt": old}, step=9))) == []
    assert found(old, [t._replace(name="new." + t.name) for t in dead]) == []
    assert found(old, dead, reference_facts=None) == []
    assert found(old, dead, reference_facts=Facts()) == []
    halves = [T(f"l{i}.lora_B.default.weight") for i in range(4)]
    assert found(halves, [t._replace(constant=True) for t in halves]) == []
    unknown = [t._replace(zeros=None) for t in old]  # sealed by an older version
    assert found(unknown, [t._replace(zeros=0.95) for t in old]) == []
    assert found(unknown, dead)


class Net(torch.nn.Module):
    """Convolutions with batch norm, a block that begins at zero, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(4) for _ in range(6))
        self.gate = torch.nn.Linear(4, 4)
        torch.nn.init.zeros_(self.gate.weight)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What a small vision model does."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x))) + x
        x = x.mean((2, 3))
        return self.head(x + self.gate(x))  # type: ignore[no-any-return]


def train(net: Net, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """A few updates."""
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 4, 5, 5)).square().mean().backward()
        optimizer.step()


def trained() -> tuple[Net, torch.optim.Optimizer]:
    """After some updates."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer)
    return net, optimizer


def plain(net: Net, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """It goes on."""
    for _ in range(3):
        train(net, optimizer)
        yield


def reset_optimizer(net: Net, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Its state starts from scratch."""
    optimizer.state.clear()
    train(net, optimizer)
    yield


def other_head(net: Net, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A head that is set to zero, as for a new task, and norms that are set back."""
    torch.nn.init.zeros_(net.head.weight)
    for norm in net.norms:
        norm.reset_parameters()  # type: ignore[operator]
    yield
    train(net, optimizer)
    yield


def gradual_pruning(net: Net, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The smallest weights go, a third of what is left each time."""
    left = 1.0
    for _ in range(6):
        left *= 0.67
        train(net, optimizer)
        for conv in net.convs:
            weight = conv.weight.data
            threshold = weight.abs().flatten().sort().values[int(weight.numel() * (1 - left))]
            weight[weight.abs() < threshold] = 0.0
        yield


@pytest.mark.parametrize("story", [plain, reset_optimizer, other_head, gradual_pruning])
@pytest.mark.parametrize("key", ["model", "ema"])
def test_healthy_stories(tmp_path: Path, story: Callable[..., Iterator[None]], key: str) -> None:
    """Each save of each story is GOOD."""
    net, optimizer = trained()
    assert save_and_verify(tmp_path, 1, key, net) is Outcome.GOOD
    for step, _ in enumerate(story(net, optimizer), 2):
        assert save_and_verify(tmp_path, step, key, net) is Outcome.GOOD


@pytest.mark.parametrize("key", ["model", "ema"])
@pytest.mark.parametrize("half", [False, True])
def test_a_poison_that_was_set_to_zero_is_suspect(tmp_path: Path, key: str, half: bool) -> None:
    """NaN in one layer spreads in one update; some trainers replace it by zeros before they save. The next ones are
    suspect too, until training goes back or a user says that it was meant."""
    net, optimizer = trained()
    assert save_and_verify(tmp_path, 1, key, net, half=half) is Outcome.GOOD
    alive = copy.deepcopy(net)
    net.convs[2].weight.data[0, 0] = float("nan")
    train(net, optimizer, 1)
    for value in net.state_dict().values():
        torch.nan_to_num_(value)
    assert save_and_verify(tmp_path, 2, key, net, half=half) in (Outcome.SUSPECT, Outcome.BAD)  # BAD: all of it is zero
    for conv, kept in list(zip(net.convs, alive.convs, strict=True))[:4]:
        conv.load_state_dict(kept.state_dict())
    assert save_and_verify(tmp_path, 3, key, net, half=half) is Outcome.SUSPECT
    clear(look(open_run(str(tmp_path))), "net-3.pt", reason="meant so")
    assert save_and_verify(tmp_path, 4, key, net, half=half) is Outcome.GOOD


def test_a_training_that_begins_anew_under_the_name(tmp_path: Path) -> None:
    """Its counter says so: what begins at zero does."""
    net, _ = trained()
    torch.nn.init.normal_(net.gate.weight)
    for zeroed in (False, True):
        for conv in net.convs[:3] if zeroed else ():
            torch.nn.init.zeros_(conv.weight)  # type: ignore[arg-type]
        state = {"model": net.state_dict(), "iter_num": 0 if zeroed else 100}
        torch.save(state, tmp_path / "ckpt.pt")
        view = look(open_run(str(tmp_path)))
        checkpoint = view.checkpoint("ckpt.pt")
        assert checkpoint is not None
        assert verify_checkpoint(view, checkpoint).outcome is Outcome.GOOD


def save_and_verify(root: Path, step: int, key: str, net: Net, *, half: bool = False) -> Outcome:
    """The verdict on a save of these weights."""
    state = {
        name: value.half() if half and value.is_floating_point() else value for name, value in net.state_dict().items()
    }
    torch.save({key: state, "epoch": step}, root / f"net-{step}.pt")
    view = look(open_run(str(root)))
    checkpoint = view.checkpoint(f"net-{step}.pt")
    assert checkpoint is not None
    return verify_checkpoint(view, checkpoint).outcome
