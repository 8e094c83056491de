"""Training that turns sick: what counts as sick, what is left behind, when it ends."""

import random

import pytest
import torch
from support.faults import flip
from support.guards import guarded
from support.half_training import Half, batches, run_half, taken
from support.runs import QUICK
from support.views import look

import ckptguard
from ckptguard.errors import NoKnownGoodError, RollbackExhausted, SettingsError, SickTrainingError
from ckptguard.inspect.list_states import survey
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target


@pytest.mark.parametrize("tell_norm", [True, False])
def test_skip_leaves_a_deterministic_overflow_behind(tmp_path, tell_norm):
    """A batch that overflows in fp16 every time is left out, those before it are replayed, and training ends finite."""
    model, losses, steps = run_half(tmp_path / "run", batches(20, hot={7}), 12, tell_norm=tell_norm)
    assert steps[:8] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps[8] == 7  # back to step 6
    assert steps[-1] == 12
    assert not all(map(torch.isfinite, map(torch.tensor, losses)))
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    assert verify_target(str(tmp_path / "run"), QUICK).outcome is Outcome.GOOD
    (incident,) = list_incidents(open_run(str(tmp_path / "run")))
    assert incident.known_good == "6.1"


def test_what_is_left_out_stays_left_out(tmp_path):
    """The second epoch, and a resume, do not meet the harmful draw of the first epoch again; the same data in another
    epoch is another draw."""
    data = batches(10, hot={4})

    def tell(step, number):
        return {"loss": 1.0, "grad_norm": float("inf") if number == 4 else 1.0}

    seen = [one for total in (6, 9) for one in taken(tmp_path / "run", data, total, tell, save_every=2)]
    assert seen == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (5, 5), (6, 6), (7, 7), (8, 8), (9, 9)]


def test_a_poisoned_state_is_never_saved(tmp_path):
    """Without any signal from the loop, weights are read before each save, and the poison is found there."""
    model = Half()
    saved = []
    with guarded(tmp_path / "run", model) as guard:
        for step, _ in guard.steps(batches(9), total=6, save_every=2):
            if step == 3 and not saved:
                saved.append(step)
                with torch.no_grad():
                    model.weight.mul_(1e30).mul_(1e30)
    assert all(c.outcome is Outcome.GOOD for c in verify_target(str(tmp_path / "run"), QUICK).checkpoints)
    assert torch.isfinite(model.weight).all()
    (incident,) = list_incidents(open_run(str(tmp_path / "run")))
    assert incident.evidence["tensor"] == "weight"


def test_a_poisoned_buffer_is_found(tmp_path):
    """Buffers count: a batch whose update was skipped can still leave NaN in running statistics."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    overflowed = []
    with guarded(tmp_path / "run", model, policy=ckptguard.RollbackPolicy(check_every=1)) as guard:
        for step, x in guard.steps(batches(9), total=6, save_every=3):
            if step == 2 and not overflowed:
                overflowed.append(step)
                x = x * 1e30 * 1e10
            model(x)
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    (incident,) = list_incidents(open_run(str(tmp_path / "run")))
    assert incident.step == 2
    assert incident.evidence["tensor"] in ("1.running_mean", "1.running_var")


@pytest.mark.parametrize("own_files", [False, True])
def test_explicit_save_refuses_a_poisoned_state(tmp_path, own_files):
    """save() raises instead of saving what is poisoned, and names the tensor; files of the user's own are not begun."""
    model = Half()
    options = {
        "save": lambda path, _: torch.save(model.state_dict(), path),
        "load": torch.load,
        "name": "step-{step}.pt",
    }
    guard = guarded(tmp_path / "run", model, **(options if own_files else {}))
    with torch.no_grad():
        model.weight.mul_(1e30).mul_(1e30)
    with pytest.raises(SickTrainingError, match="weight"):
        guard.save(step=1)
    assert not list((tmp_path / "run").glob("step-*"))


def test_a_masked_batch_is_no_sickness(tmp_path):
    """A NaN loss beside finite gradients and weights (all labels masked) does not take training back."""
    model = Half()
    steps = []
    nothing = torch.full((2,), -100)
    with guarded(tmp_path / "run", model) as guard:
        for step, _ in guard.steps(batches(9), total=9, save_every=3):
            steps.append(step)
            masked = torch.nn.functional.cross_entropy(torch.randn(2, 3), nothing)
            assert torch.isnan(masked)
            guard.observe(loss=masked if step in (3, 4, 7) else 0.5, grad_norm=0.0)
    assert steps == list(range(1, 10))
    assert list_incidents(open_run(str(tmp_path / "run"))) == []


def test_masked_batches_in_a_row_are_a_sickness(tmp_path):
    """Five NaN losses in a row are acted on, and all five draws are left out."""

    def tell(step, number):
        return {"loss": float("nan") if 6 <= number <= 10 else 0.5, "grad_norm": 0.0}

    found = taken(tmp_path / "run", batches(30), 12, tell, save_every=4)
    assert [number for _, number in found] == [*range(11), 4, 5, *range(11, 17)]


def test_the_budget_ends_it(tmp_path):
    """Every update overflows: after three rollbacks RollbackExhausted, which names a report that people can read."""
    with pytest.raises(RollbackExhausted) as caught:
        run_half(tmp_path / "run", batches(40, hot=range(6, 40)), 30)
    with open(caught.value.report, encoding="utf-8") as report:
        text = report.read()
    assert "gave up: the budget of 3 rollbacks is spent" in text
    assert "The last updates" in text
    assert len(list_incidents(open_run(str(tmp_path / "run")))) == 4
    assert verify_target(str(tmp_path / "run"), QUICK).outcome is Outcome.GOOD


def test_a_second_incident_soon_goes_further_back_and_slower(tmp_path):
    """Within two save intervals: one GOOD checkpoint further back, and half the learning rate, schedule included."""
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 100 else 0.1)
    rates = []

    def tell(step, number):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        return {"loss": 1.0, "grad_norm": float("nan") if number in (7, 9) else 1.0}

    found = taken(tmp_path / "run", batches(40), 14, tell, model=model, optimizer=optimizer, scheduler=scheduler)
    assert [step for step, _ in found] == [*range(1, 9), 7, 8, 9, *range(4, 15)]
    assert (rates[0], rates[-1]) == (0.4, pytest.approx(0.2))
    outcomes = {c.path: c.outcome for c in survey(look(str(tmp_path / "run"))) if c.quarantined}
    assert outcomes
    assert all(o is Outcome.SUSPECT for o in outcomes.values())
    with guarded(tmp_path / "run", model, optimizer, scheduler=scheduler) as again:
        assert again.resume() == 14
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


@pytest.mark.parametrize(("back", "interrupted"), [(5, None), (5, 10), (5, 13), (None, None), (None, 10)])
def test_a_learning_rate_that_was_cut_comes_back_when_enough_updates_were_healthy(tmp_path, caplog, back, interrupted):
    """It is said at once with both rates, and again when it is back, which the option decides. A restart of training
    in between changes nothing."""
    rates = {}

    def train(total):
        model = Half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

        def tell(step, number):
            rates[step] = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            return {"loss": 1.0, "grad_norm": float("nan") if number in (7, 9) else 1.0}

        policy = ckptguard.RollbackPolicy(lr_back=back)
        more = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "policy": policy}
        taken(tmp_path / "run", batches(40), total, tell, **more)
        return optimizer.param_groups[0]["lr"]

    if interrupted is not None:
        train(interrupted)
    last = train(20)
    # Update 9 is the last one that an incident suspects. After step 14 five healthy updates were made since.
    expected = {step: 0.4 if step <= 3 or (back and step > 14) else 0.2 for step in range(1, 21)}
    assert rates == pytest.approx(expected)
    assert last == pytest.approx(expected[20])
    assert "the learning rate is cut from 0.4 to 0.2: it is x 0.5 after incidents" in caplog.text
    assert ("the learning rate is back from 0.2 to 0.4: no incident came since step 9" in caplog.text) == bool(back)
    said = list_incidents(open_run(str(tmp_path / "run")))[1].actions[-1]
    assert ("learning rate x 0.5 until 5 updates are healthy" if back else "learning rate x 0.5, skip") in said


def _set(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 0.3 if step >= 12 else group["lr"]


def _follow(optimizer, step):
    """As a scheduler that the guard was not given."""
    for group in optimizer.param_groups:
        group["lr"] = 0.4 - 0.01 * step


def _add(optimizer, step):
    if step == 12:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.3})


class Foreign:
    """A scheduler of another kind than torch's, which says nothing of the rates that it starts from."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("scheduler", [None, Foreign()], ids=["none", "foreign"])
@pytest.mark.parametrize("change", [_set, _follow, _add])
def test_a_rate_that_something_else_set_is_not_raised(tmp_path, caplog, change, scheduler):
    """It is as its owner wants it: once the cut would end, no rate is higher than that."""
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    wanted = []

    def tell(step, number):
        wanted.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        change(optimizer, step)
        after = [group["lr"] for group in optimizer.param_groups]
        wanted.append(after)
        return {"loss": 1.0, "grad_norm": float("nan") if number in (7, 9) else 1.0}

    policy = ckptguard.RollbackPolicy(lr_back=5)
    taken(tmp_path / "run", batches(40), 20, tell, model=model, optimizer=optimizer, scheduler=scheduler, policy=policy)
    assert [group["lr"] for group in optimizer.param_groups] == wanted[-1]
    assert "the learning rate is as something else set it: the cut by x 0.5 ends" in caplog.text
    assert "the learning rate is back" not in caplog.text


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path):
    """At a rollback the newest save turns out damaged: the next older one is used, and BAD is on record."""
    model = Half()
    steps = []
    with guarded(tmp_path / "run", model) as guard:
        for step, _ in guard.steps(batches(30), total=9, save_every=3):
            steps.append(step)
            if len(steps) == 8:
                newest = tmp_path / "run" / "step-000000006" / "model.safetensors"
                flip(newest, -1, new_times=True)
                guard.rollback("a test")
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, *range(4, 10)]
    states = survey(look(str(tmp_path / "run")))
    (bad,) = [s for s in states if s.outcome is Outcome.BAD]
    assert (str(bad.id), bad.quarantined) == ("6.1", True)


def test_a_resume_passes_over_damage(tmp_path):
    """A new process finds its newest checkpoint damaged, and goes on from the one before."""
    run_half(tmp_path / "run", batches(20), 6)
    flip(tmp_path / "run" / "step-000000006" / "model.safetensors", -1, new_times=True)
    _, _, steps = run_half(tmp_path / "run", batches(20), 8)
    assert steps == [4, 5, 6, 7, 8]
    good = [c.path for c in survey(look(str(tmp_path / "run"))) if c.in_place]
    assert good == [f"step-{n:09d}" for n in (0, 3, 6, 8)]


def test_nothing_to_go_back_to(tmp_path):
    """If every checkpoint is damaged, training ends with one clear error and not from somewhere half loaded."""

    def train(guard):
        for step, _ in guard.steps(batches(30), total=9, save_every=3):
            if step == 5:
                for path in (tmp_path / "run").glob("step-*/model.safetensors"):
                    flip(path, -1, new_times=True)
                guard.rollback("a test")

    with guarded(tmp_path / "run", Half()) as guard, pytest.raises(NoKnownGoodError):
        train(guard)


def test_a_sick_start_is_refused(tmp_path):
    """A model that is not finite to begin with is not trained."""
    model = Half()
    with torch.no_grad():
        model.weight.mul_(1e30).mul_(1e30)
    with guarded(tmp_path / "run", model) as guard, pytest.raises(SickTrainingError, match="cannot begin"):
        next(iter(guard.steps(batches(3), total=2, save_every=1)))


def test_a_mask_is_no_sickness(tmp_path):
    """A buffer of zeros and minus infinity is how attention masks look."""
    model = Half()
    model.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    with guarded(tmp_path / "run", model, policy=ckptguard.RollbackPolicy(check_every=1)) as guard:
        assert [s for s, _ in guard.steps(batches(5), total=3, save_every=3)] == [1, 2, 3]


@pytest.mark.parametrize("loader", [iter([1]), (n for n in range(3)), 5, []])
def test_loaders_that_cannot_be_gone_back_in_are_refused(tmp_path, loader):
    """One-shot iterators, things that are no loader and empty loaders get one clear sentence."""
    with guarded(tmp_path / "run", Half()) as guard, pytest.raises(SettingsError, match="loader"):
        next(iter(guard.steps(loader, total=2, save_every=1)))


def test_what_cannot_be_saved_is_refused_at_construction(tmp_path):
    """State that would need pickle is refused before step 1, with its path."""
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["generator"] = random.Random(1)
    with pytest.raises(ckptguard.CkptguardError, match=r"optimizer\.param_groups\.0\.generator"):
        guarded(tmp_path / "run", model, optimizer)
