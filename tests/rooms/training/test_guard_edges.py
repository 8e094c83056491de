"""Corners of TrainingGuard that users reach."""

from pathlib import Path

import pytest
import torch
from support.runs import QUICK

import ckptguard
from ckptguard.errors import BusyError, SettingsError, StateError
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.recover import roll_back as roll_back_module
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import Selection, verify_target


def guard_of(run, **options):
    """A guard over a tiny model and AdamW."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = ckptguard.TrainingGuard(run, model=model, optimizer=optimizer, daemon="off", settings=QUICK, **options)
    return guard, model, optimizer


def update(model, optimizer):
    """One healthy update."""
    optimizer.zero_grad()
    loss = model(torch.ones(4, 3)).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def test_poisoned_optimizer_state_is_sick(tmp_path):
    """Moments that overflowed are never saved, and training goes back to before them."""
    guard, model, optimizer = guard_of(tmp_path / "run")
    poisoned = False
    for step, _ in guard.steps([1, 2, 3, 4], total=12, save_every=4):
        guard.observe(loss=update(model, optimizer))
        if step == 6 and not poisoned:
            poisoned = True
            for state in optimizer.state.values():
                state["exp_avg_sq"].add_(3e38).mul_(10)
    outcomes = {c.step: c.outcome for c in verify_target(str(tmp_path / "run"), QUICK).checkpoints}
    assert outcomes == dict.fromkeys((0, 4, 8, 12), Outcome.GOOD)
    [incident] = list_incidents(open_run(str(tmp_path / "run")))
    assert "exp_avg_sq" in incident.reason


def test_names_whose_step_cannot_be_told_are_refused(tmp_path):
    """epoch-1-{step}.pt would always be step 1; a text without a suffix is no checkpoint that anybody recognises."""
    for name in ("epoch-1-{step}.pt", "{step}-of-99999.pt"):
        with pytest.raises(SettingsError):
            guard_of(tmp_path / "run", save=lambda path, step: None, load=lambda path: None, name=name)
    guard, _, _ = guard_of(
        tmp_path / "run",
        save=lambda path, step: Path(path).write_text("not a checkpoint" * 99),
        load=lambda path: None,
        name="model-{step}",
    )
    with pytest.raises(StateError, match="not recognised"):
        guard.save(step=3)


def test_a_file_of_torch_needs_no_suffix(tmp_path):
    """What torch.save writes is known by its bytes."""
    guard, model, _ = guard_of(
        tmp_path / "run",
        save=lambda path, step: torch.save(model.state_dict(), path),
        load=lambda path: model.load_state_dict(torch.load(path)),
        name="model-{step}",
    )
    assert guard.save(step=3).endswith("model-3")


@pytest.mark.parametrize("step", [-1, 10**13])
def test_impossible_steps_are_refused(tmp_path, step):
    """Nothing is written for them."""
    guard, _, _ = guard_of(tmp_path / "run")
    with pytest.raises(SettingsError):
        guard.save(step=step)
    assert [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith("step")] == []


def test_a_rollback_that_cannot_be_made_closes_its_incident(tmp_path, monkeypatch):
    """Another process holds the run: the error is clear, and the incident says what became of it."""
    guard, model, optimizer = guard_of(tmp_path / "run")

    def busy(*args, **kwargs):
        raise BusyError("another process is moving files")

    monkeypatch.setattr("ckptguard.training.rollback.load_known_good.roll_back", busy)
    assert roll_back_module.roll_back is not busy

    def train():
        for step, _ in guard.steps([1, 2, 3], total=6, save_every=2):
            guard.observe(loss=update(model, optimizer), grad_norm=float("nan") if step == 3 else 1.0)

    with pytest.raises(BusyError):
        train()
    [incident] = list_incidents(open_run(str(tmp_path / "run")))
    assert incident.state == "closed"
    assert "could not roll back" in incident.actions[-1]


def test_asked_rollbacks_are_no_sickness(tmp_path):
    """They spend no budget."""
    guard, model, optimizer = guard_of(tmp_path / "run")
    asked = 0
    for step, _ in guard.steps([1, 2, 3, 4], total=8, save_every=2):
        guard.observe(loss=update(model, optimizer))
        if step == 5 and asked < 5:
            asked += 1
            guard.rollback("look again")
    assert (asked, guard.step) == (5, 8)


def test_checkpoints_of_our_own_layout_need_no_waiting(tmp_path):
    """They are finished by their seal: --wait 0 verifies them at once."""
    guard, model, optimizer = guard_of(tmp_path / "run")
    for _ in guard.steps([1, 2], total=2, save_every=2):
        guard.observe(loss=update(model, optimizer))
    report = verify_target(str(tmp_path / "run"), QUICK.changed(settle=3600.0), Selection(wait=0.0))
    assert [c.outcome for c in report.checkpoints] == [Outcome.GOOD, Outcome.GOOD]
