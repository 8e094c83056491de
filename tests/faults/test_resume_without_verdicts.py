"""A resume where no verdict says what is good: a full disk, nothing but damage, a damaged record beside a save."""

import json

import pytest
import torch
from support.faults import flip
from support.runs import QUICK
from support.training_faults import FullDisk

import ckptguard
from ckptguard.errors import NoKnownGoodError


def guard_of(run, model, **options):
    """A guard without a daemon, so that its saves have no verdict until somebody asks."""
    return ckptguard.TrainingGuard(str(run), model=model, daemon="off", settings=QUICK, **options)


def train(run, model, *, total, **options):
    """Train with a save after every second update; the batches that were drawn."""
    drawn = []
    with guard_of(run, model, **options) as guard:
        for _, batch in guard.steps([10, 11, 12, 13, 14], total=total, save_every=2):
            drawn.append(batch)
            guard.observe(loss=1.0)
    return drawn


def own_files(model):
    """A user's own save and load."""
    return {
        "save": lambda path, step: torch.save(model.state_dict(), path),
        "load": lambda path: model.load_state_dict(torch.load(path)),
    }


def test_a_restart_on_a_full_disk_does_not_begin_anew(tmp_path, monkeypatch):
    """What is pending is read, and found good, although that cannot be written down."""
    run, model = tmp_path / "run", torch.nn.Linear(2, 2)
    train(run, model, total=4)
    disk = FullDisk(monkeypatch, run)
    disk.full = True
    other = torch.nn.Linear(2, 2)
    assert guard_of(run, other).resume() == 4
    assert torch.equal(other.weight, model.weight)


def test_nothing_but_damage_is_an_error_and_not_a_new_training(tmp_path):
    """The loss of everything should not look like a fresh start."""
    run, model = tmp_path / "run", torch.nn.Linear(2, 2)
    train(run, model, total=4)
    for file in run.glob("step-*/model.safetensors"):
        flip(file, -3, 0x40, new_times=True)
    before = sorted(p.name for p in run.glob("step-*"))
    for _ in range(2):
        with pytest.raises(NoKnownGoodError, match="none of them is good") as caught:
            next(guard_of(run, model).steps([1, 2], total=9, save_every=2))
        assert "to start from scratch" in caught.value.hint
    assert sorted(p.name for p in run.glob("step-*")) == before


def test_what_was_never_finished_is_no_reason_not_to_begin(tmp_path):
    """A first save that was killed in the middle leaves such a folder."""
    run, model = tmp_path / "run", torch.nn.Linear(2, 2)
    (run / "step-000000002").mkdir(parents=True)
    (run / "step-000000002" / "model.safetensors").write_bytes(b"\0" * 10)
    assert train(run, model, total=2) == [10, 11]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[1]\n",
        lambda text: '{"ckptguard_state": 1, "step": 4}\n',
        lambda text: text.replace('"taken":4', '"taken":1'),
        lambda text: '{"extra": ' + "[" * 900 + "]" * 900 + "}\n",
    ],
    ids=["half", "list", "empty", "other", "deep"],
)
def test_a_damaged_record_beside_a_save_costs_the_place_in_the_data_only(tmp_path, caplog, damage):
    """The user's own file is whole, and training goes on from it."""
    run, model = tmp_path / "run", torch.nn.Linear(2, 2)
    train(run, model, total=4, **own_files(model))
    record = max((run / "_ckptguard" / "training").iterdir())
    assert json.loads(record.read_text())["step"] == 4
    damaged = damage(record.read_text())
    assert damaged != record.read_text()
    record.write_text(damaged)
    assert train(run, model, total=6, **own_files(model)) == [10, 11]
    assert "the data epoch starts again" in caplog.text


def test_a_record_without_a_check_is_still_read(tmp_path):
    """As they were written before."""
    run, model = tmp_path / "run", torch.nn.Linear(2, 2)
    train(run, model, total=4, **own_files(model))
    record = max((run / "_ckptguard" / "training").iterdir())
    state = json.loads(record.read_text())
    del state["check"]
    record.write_text(json.dumps(state))
    assert train(run, model, total=6, **own_files(model)) == [14, 10]
