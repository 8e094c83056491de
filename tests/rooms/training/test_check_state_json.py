"""What is sealed beside model and optimizer and is nothing that a guard saves: an older checkpoint, or one sentence."""

import copy
from pathlib import Path

import pytest
import torch
from support.runs import QUICK

import ckptguard
from ckptguard.errors import CkptguardError, StateError
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.state.data_position import DataPosition
from ckptguard.training.state.progress import Progress, wrong_with

DELETED = object()
FORGED = [
    (("rng",), 7),
    (("rng",), {}),
    (("rng", "python"), (3, (1, 2), None)),
    (("rng", "torch"), b"short"),
    (("rng", "torch"), [1] * 5056),
    (("rng", "numpy"), ("MT19937", 1)),
    (("rng", "cuda"), [3]),
    (("guard",), [1.0]),
    (("guard", "lr_factor"), 0),
    (("guard", "lr_factor"), float("nan")),
    (("guard", "lr_factor"), "1"),
    (("guard", "lr_factor"), True),
    (("guard", "lr_cut_at"), -1),
    (("data",), "epoch"),
    (("data", "epoch"), -1),
    (("data", "taken"), 1.0),
    (("data", "begun"), DELETED),
    (("data", "length"), DELETED),
    (("data", "skipped"), [3]),
    (("data", "skipped"), DELETED),
    (("data", "epoch_start"), None),
    (("data", "epoch_start", "generators"), ["x"]),
    (("data", "epoch_start", "rng"), DELETED),
    (("data", "epoch_start", "rng"), {"python": 1}),
]


def sound() -> dict[str, object]:
    """What a guard saves within an epoch."""
    progress = Progress(TrainingParts(model=torch.nn.Linear(2, 2)))
    progress.use_loader([1, 2, 3])
    progress.next_batch()
    return progress.extra()


def forge(extra: dict[str, object], path: tuple[str, ...], value: object) -> dict[str, object]:
    """The same with one value replaced."""
    forged = copy.deepcopy(extra)
    place = forged
    for name in path[:-1]:
        place = place[name]
    if value is DELETED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return forged


def test_what_a_guard_saves_is_sound() -> None:
    """Within an epoch, before the first, without a loader, and from a version that saved less."""
    assert wrong_with(sound()) is None
    assert wrong_with(sound() | {"data": DataPosition([1]).state()}) is None
    assert wrong_with(sound() | {"data": None}) is None
    assert wrong_with({}) is None
    assert wrong_with({"guard": {"lr_factor": 0.5}}) is None
    assert wrong_with({"guard": {"lr_factor": 0.5, "lr_cut_at": 3}}) is None


@pytest.mark.parametrize(("path", "value"), FORGED, ids=[".".join(p) for p, _ in FORGED])
def test_every_forgery_is_told(path: tuple[str, ...], value: object) -> None:
    """By the part that holds it; nothing is taken over then."""
    forged = forge(sound(), path, value)
    assert f"its {path[0]} " in (wrong_with(forged) or "")
    progress = Progress(TrainingParts(model=torch.nn.Linear(2, 2)))
    state = torch.get_rng_state()
    with pytest.raises(StateError, match="cannot be restored"):
        progress.arrive(1, forged)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("path", "value"), [FORGED[0], FORGED[8], FORGED[13]])
def test_the_next_older_checkpoint_is_taken(tmp_path: Path, monkeypatch, caplog, path, value) -> None:
    """It is sealed and its bytes are right: only what it says is not."""
    model = torch.nn.Linear(2, 2)
    guard = ckptguard.TrainingGuard(tmp_path, model=model, daemon=None, settings=QUICK)
    for _ in guard.steps([1.0], total=1, save_every=1):
        guard.observe(loss=1.0)
    forged = forge(sound(), path, value)
    monkeypatch.setattr(Progress, "extra", lambda self: forged)
    guard.save(step=2)
    again = ckptguard.TrainingGuard(tmp_path, model=model, daemon=None, settings=QUICK)
    assert again.resume() == 1
    assert [m for m in caplog.messages if "step-000000002 cannot be restored" in m]


def test_state_that_the_objects_refuse_is_one_sentence(tmp_path: Path) -> None:
    """An optimizer of other groups says so by a ValueError."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckptguard.TrainingGuard(tmp_path, model=model, optimizer=optimizer, daemon=None, settings=QUICK).save(1)
    other = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    guard = ckptguard.TrainingGuard(tmp_path, model=model, optimizer=other, daemon=None, settings=QUICK)
    with pytest.raises(CkptguardError, match=r"does not fit: ValueError: .*parameter groups"):
        guard.resume()
