"""Through the guard: exceptions, skips and scales that take training back, and trouble that must not."""

import math
import random

import pytest
import torch
from support.faults import flip
from support.guards import guarded
from support.half_training import Half, batches, taken
from support.training_faults import FullDisk
from support.views import look

import ckptguard
from ckptguard.inspect.list_states import survey
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.values.verdict import Outcome


def incidents(run):
    """(cause, step) of every incident of a run."""
    return [(i.cause, i.step) for i in list_incidents(open_run(str(run)))]


def test_an_exception_takes_training_back(tmp_path):
    """DeepSpeed raises at the floor of its scale: the guard takes that for an incident, and training goes on."""

    def tell(step, number):
        floor = Exception("Current loss scale already at minimum - cannot decrease scale anymore.")
        return {"error": floor} if number == 4 else {"loss": 1.0, "grad_norm": 1.0}

    found = taken(tmp_path / "run", batches(20), 8, tell, save_every=2)
    assert [number for _, number in found] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert incidents(tmp_path / "run") == [("loss_scale", 5)]


def test_an_exception_of_the_users_own_is_told_apart(tmp_path):
    """A healthy answer says: raise it again."""
    with guarded(tmp_path / "run", Half()) as guard:
        assert not guard.observe(error=KeyError("labels")).sick
    assert incidents(tmp_path / "run") == []


def test_an_engine_that_skips_every_update_is_seen(tmp_path):
    """Five skips in a row without any loss scale take training back to before the first of them."""

    def tell(step, number):
        return {"grad_norm": math.nan, "skipped": True} if 4 <= number <= 8 else {"grad_norm": 1.0, "skipped": False}

    found = taken(tmp_path / "run", batches(30), 9, tell)
    assert found[9:12] == [(4, 3), (5, 9), (6, 10)]
    assert incidents(tmp_path / "run") == [("skipped", 9)]


def test_a_warm_up_from_a_learning_rate_of_zero(tmp_path):
    """Losses that do not move at first, then fall, and weights that do not change, are no sickness, spikes included."""
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 20, 1.0))
    policy = ckptguard.RollbackPolicy(spikes=ckptguard.Spikes(window=8, warm_up=8))
    steps = []
    with guarded(tmp_path / "run", model, optimizer, scheduler=warm_up, policy=policy) as guard:
        for step, x in guard.steps(batches(4), total=40, save_every=10):
            steps.append(step)
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            guard.observe(loss=loss, grad_norm=norm)
    assert steps == list(range(1, 41))
    assert incidents(tmp_path / "run") == []


def test_a_rotten_old_checkpoint_starts_nothing(tmp_path):
    """Damage of an old checkpoint is a matter of the records; training goes on."""
    steps = []
    with guarded(tmp_path / "run", Half()) as guard:
        for step, _ in guard.steps(batches(30), total=9, save_every=3):
            steps.append(step)
            if step == 7:
                flip(tmp_path / "run" / "step-000000003" / "model.safetensors", -1, new_times=True)
            guard.observe(loss=1.0, grad_norm=1.0)
    assert steps == list(range(1, 10))
    assert incidents(tmp_path / "run") == []


def test_long_without_a_save_is_told_once(tmp_path, monkeypatch):
    """Every failed save is an incident; that nothing was saved for more than three intervals is one more."""
    disk = FullDisk(monkeypatch, tmp_path / "run" / "tmp-step-")
    with guarded(tmp_path / "run", Half()) as guard:
        for step, _ in guard.steps(batches(30), total=14, save_every=2):
            disk.full = 3 <= step < 14
            guard.observe(loss=1.0)
    found = incidents(tmp_path / "run")
    assert found.count(("unsaved", 10)) == 1
    assert [cause for cause, _ in found].count("unsaved") == 1
    assert [cause for cause, _ in found].count("storage") == 5


@pytest.mark.parametrize("blocking", [True, False])
def test_going_back_on_a_full_disk(tmp_path, monkeypatch, blocking):
    """Nothing can be recorded, moved aside or saved: training goes back to what reads good all the same."""
    disk = FullDisk(monkeypatch, tmp_path)
    model, steps = Half(), []
    with guarded(tmp_path / "run", model, saving=ckptguard.Saving(blocking=blocking)) as guard:
        for step, _ in guard.steps(batches(30), total=9, save_every=3):
            steps.append(step)
            if len(steps) == 5:
                guard._saving.drain(30.0)
                disk.full = True
                with torch.no_grad():
                    model.weight[0, 0] = math.nan
            disk.full = disk.full and len(steps) < 7
            guard.observe(loss=1.0, grad_norm=math.nan if len(steps) == 5 else 1.0)
    assert steps == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9]
    assert torch.isfinite(model.weight).all()
    states = survey(look(str(tmp_path / "run")))
    assert {s.outcome for s in states if s.in_place} <= {Outcome.GOOD, Outcome.PENDING}


def test_a_margin_reaches_checkpoints_without_a_verdict(tmp_path):
    """The one that the margin asks for had no verdict yet: it is verified, and training goes back to it."""

    def tell(step, number):
        return {"loss": 1.0, "grad_norm": math.nan if number == 6 else 1.0}

    policy = ckptguard.RollbackPolicy(margin=2)
    found = taken(tmp_path / "run", batches(30), 9, tell, save_every=2, policy=policy)
    assert [step for step, _ in found] == [*range(1, 8), *range(5, 10)]


@pytest.mark.parametrize("seed", range(20))
def test_only_the_batch_with_the_sign_is_skipped(tmp_path, seed):
    """Wherever the harmful batch comes and however often is saved: all others are trained on, in their order."""
    chance = random.Random(seed)
    hot, save_every, total = chance.randrange(20), chance.randint(1, 7), 20
    data, taken, policy = batches(total + 2, hot=(hot,)), {}, ckptguard.RollbackPolicy(check_every=chance.randint(1, 9))
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tells_norm = chance.random() < 0.5
    with guarded(tmp_path / "run", model, optimizer, policy=policy) as guard:
        for step, x in guard.steps(data, total=total, save_every=save_every):
            taken[step] = next(n for n, batch in enumerate(data) if batch is x)
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            guard.observe(loss=loss, grad_norm=norm if tells_norm else None)
    assert [taken[step] for step in range(1, total + 1)] == [n for n in range(total + 1) if n != hot]
    assert len(incidents(tmp_path / "run")) == 1
