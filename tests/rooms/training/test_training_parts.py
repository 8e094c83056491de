"""Optimizers and schedules as people use them come back exactly; torch's own scaler is raised where it collapsed."""

import pytest
import torch
from support.guards import guarded
from torch.optim import lr_scheduler

from ckptguard.training.signals.device_signals import raise_loss_scale

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True, capturable=False),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
    "nadam": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
}
SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=50),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], milestones=[3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
}


def build(make_optimizer, make_schedule):
    """A small training."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = make_optimizer(list(model.parameters()))
    return model, optimizer, make_schedule(optimizer) if make_schedule else None


def update(model, optimizer, schedule, step):
    """One update."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    if schedule is not None:
        schedule.step()


def goes_on_the_same(tmp_path, make_optimizer, make_schedule):
    """Six updates in one go, and three, a save, a resume elsewhere and three more: the same weights."""
    whole = build(make_optimizer, make_schedule)
    for step in range(6):
        update(*whole, step)
    first = build(make_optimizer, make_schedule)
    for step in range(3):
        update(*first, step)
    model, optimizer, schedule = first
    guarded(tmp_path / "run", model, optimizer, scheduler=schedule).save(step=3)
    second = build(make_optimizer, make_schedule)
    update(*second, 77)
    model, optimizer, schedule = second
    assert guarded(tmp_path / "run", model, optimizer, scheduler=schedule).resume() == 3
    for step in range(3, 6):
        update(*second, step)
    assert torch.equal(whole[0].weight, second[0].weight)
    assert whole[1].param_groups[0]["lr"] == second[1].param_groups[0]["lr"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_come_back_exactly(tmp_path, name):
    """Every optimizer's state is saved without pickle, and training goes on bit for bit."""
    goes_on_the_same(tmp_path, OPTIMIZERS[name], None)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_come_back_exactly(tmp_path, name):
    """Every schedule's state too: counters, milestones, schedules inside schedules."""
    goes_on_the_same(tmp_path, OPTIMIZERS["sgd"], SCHEDULES[name])


def settled(scale):
    """A scaler that was in use."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    return scaler


def test_a_collapsed_scale_is_raised():
    """Also before the first use; a higher one stays, and what is disabled or missing is no matter."""
    for scaler in (settled(2.0), torch.amp.GradScaler("cpu", init_scale=2.0)):
        raise_loss_scale(scaler, 256.0)
        assert scaler.get_scale() == 256.0
        assert scaler.scale(torch.ones(())).item() == 256.0
    high = settled(1024.0)
    raise_loss_scale(high, 256.0)
    assert high.get_scale() == 1024.0
    raise_loss_scale(torch.amp.GradScaler("cpu", enabled=False), 256.0)
    raise_loss_scale(None, 256.0)


def test_a_scaler_of_its_own_kind_is_let_be():
    """Where the state has no scale by that name, nothing is guessed."""

    class Own:
        def get_scale(self):
            return 1.0

        def state_dict(self):
            return {"mine": 1.0}

        def load_state_dict(self, state):
            raise AssertionError("nothing is to be loaded")

    raise_loss_scale(Own(), 256.0)
