"""A rollback on a full disk: what it could not mark then is put aside and recorded once there is space."""

import math

import pytest
import torch
from support.runs import QUICK
from support.training_faults import FullDisk
from support.views import look

import ckptguard
from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.inspect.list_states import survey
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.training.rollback.rollbacks import Unrecorded
from ckptguard.values.verdict import Outcome

NAN_FROM = 17  # a row of NaN losses begins here; the weights stay finite, and step 20 is saved within it


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(space_at, until): train to an update, with a disk that is full from the rollback on until `space_at` comes
    again; the updates that were made, in their order."""
    run = tmp_path / "run"
    disk = FullDisk(monkeypatch, run)

    def begin(*, space_at, until):
        torch.manual_seed(1)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = [torch.randn(4, 2, generator=torch.Generator().manual_seed(n)) for n in range(60)]
        made = []
        policy = RollbackPolicy(nan_losses=6)
        with ckptguard.TrainingGuard(
            str(run), model=model, optimizer=optimizer, daemon="off", settings=QUICK, policy=policy
        ) as guard:
            for step, x in guard.steps(data, total=40, save_every=10):
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                sick = NAN_FROM <= step < NAN_FROM + 6 and NAN_FROM + 5 not in made
                again = step in made
                made.append(step)
                disk.full = step >= 21 or disk.full
                if again and step >= space_at:
                    disk.full = False
                guard.observe(loss=math.nan if sick else loss)
                if again and step == until:
                    break
        return made

    return begin


def states(run):
    """{id: (quarantined, outcome)} of every checkpoint of the run."""
    return {str(s.id): (s.quarantined, s.outcome) for s in survey(look(open_run(str(run))))}


def test_it_is_made_up_for_once_there_is_space(train, tmp_path, caplog):
    """The save within the row of NaN losses is put aside as suspect, and the incident is recorded with its report."""
    made = train(space_at=12, until=18)
    assert made == [*range(1, 23), *range(11, 19)]
    assert "could resume from these unmarked checkpoints: step-000000020" in caplog.text
    assert states(tmp_path / "run")["20.1"] == (True, Outcome.SUSPECT)
    run = open_run(str(tmp_path / "run"))
    [incident] = list_incidents(run)
    assert (incident.cause, incident.state, incident.known_good) == ("nan_loss", "closed", "10.1")
    assert "went back from step 22 to step 10" in incident.actions[-1]
    assert incident.known_details().samples
    assert run.records.stat(f"incidents/{incident.id}.html").size > 1000


def test_without_space_nothing_is_lost(train, tmp_path):
    """Up to the end there is none: nothing was moved, and nothing half-written is left."""
    train(space_at=99, until=18)
    found = states(tmp_path / "run")
    assert set(found) == {"0.1", "10.1", "20.1"}
    assert not any(quarantined for quarantined, _ in found.values())
    assert list_incidents(open_run(str(tmp_path / "run"))) == []


def test_what_is_owed_is_tried_ever_more_rarely():
    """After 1, 2, 4 updates and so on, then at every 64th; at once when it matters."""
    owed, calls, tries = Unrecorded(), 0, []

    def record():
        tries.append(calls)
        raise OSError("full")

    owed.settle()
    owed.note(record)
    while calls < 200:
        calls += 1
        owed.settle()
    assert tries == [1, 2, 4, 8, 16, 32, 64, 128, 192]
    calls = 201
    owed.settle(now=True)
    assert tries[-1] == 201
