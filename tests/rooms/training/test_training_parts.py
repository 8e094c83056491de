"""Optimizers, schedules and scalers as people use them: their state goes to disk and comes back exactly."""

import pytest
import torch
from support.runs import QUICK
from torch.optim import lr_scheduler

import ckptguard
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run

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
    guard_of(tmp_path / "run", *first).save(step=3)
    second = build(make_optimizer, make_schedule)
    update(*second, 77)
    assert guard_of(tmp_path / "run", *second).resume() == 3
    for step in range(3, 6):
        update(*second, step)
    assert torch.equal(whole[0].weight, second[0].weight)
    assert whole[1].param_groups[0]["lr"] == second[1].param_groups[0]["lr"]


def guard_of(run, model, optimizer, scheduler):
    """A guard without a daemon."""
    return ckptguard.TrainingGuard(
        run, model=model, optimizer=optimizer, scheduler=scheduler, daemon="off", settings=QUICK
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_come_back_exactly(tmp_path, name):
    """Every optimizer's state is saved without pickle, and training goes on bit for bit."""
    goes_on_the_same(tmp_path, OPTIMIZERS[name], None)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_come_back_exactly(tmp_path, name):
    """Every schedule's state too: counters, milestones, schedules inside schedules."""
    goes_on_the_same(tmp_path, OPTIMIZERS["sgd"], SCHEDULES[name])


def test_a_real_scaler_comes_back(tmp_path):
    """torch's own GradScaler: one overflow is skipped and is no incident; a rollback brings the scale back."""
    model, optimizer, _ = build(OPTIMIZERS["sgd"], None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scales = []
    with ckptguard.TrainingGuard(
        tmp_path / "run", model=model, optimizer=optimizer, scaler=scaler, daemon="off", settings=QUICK
    ) as guard:
        for step, x in guard.steps([1.0, 1.0, 1e30, 1.0], total=4, save_every=2):
            optimizer.zero_grad()
            loss = (model(torch.full((2, 6), x)) * 1e10).square().mean() if x > 1 else model(torch.ones(2, 6)).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            guard.observe(loss=1.0, grad_norm=norm)
            scales.append(scaler.get_scale())
            if len(scales) == 3:
                guard.rollback("a test")
            assert step <= 4
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0]
    assert [i.cause for i in list_incidents(open_run(str(tmp_path / "run")))] == ["asked"]
    assert torch.isfinite(model.weight).all()
