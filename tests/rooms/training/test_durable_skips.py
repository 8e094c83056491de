"""What was left out stays so when the process dies before the next save; a record not ours leaves out nothing."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.runs import QUICK, write_torch

import ckptguard
from ckptguard.records.incidents import incident_key, list_incidents, open_incident, update_incident
from ckptguard.records.run import open_run
from ckptguard.training.ranks import OneRank
from ckptguard.training.state.skipped_batches import MOST_UPDATES, Drawn, leave_out_again, skipped_of, updates_left_out
from ckptguard.upkeep.reconcile import Watch, reconcile
from ckptguard.values.incident import Details

HOT = 7  # the number of the batch that does harm, from 0; it makes update 8 sick


class Crash(Exception):
    """The process dies."""


def train(run, *, total=14, crash_at=None, seed=5):
    """Train with saves at every 5th update; the batches that were used, by update. `crash_at`: die there once there
    was a rollback."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [(n, torch.ones(2) * (math.inf if n == HOT else n / 10)) for n in range(40)]
    used = {}
    with ckptguard.TrainingGuard(str(run), model=model, optimizer=optimizer, daemon="off", settings=QUICK) as guard:
        for step, (number, x) in guard.steps(data, total=total, save_every=5):
            if step == crash_at and incidents(run):
                raise Crash
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if math.isfinite(norm):
                optimizer.step()
            used[step] = number
            guard.observe(loss=loss, grad_norm=norm)
    return used


def incidents(run):
    """What the run's records tell of."""
    return list_incidents(open_run(str(run)))


def crashed(run):
    """A training that died between its rollback and the next save."""
    with pytest.raises(Crash):
        train(run, crash_at=9)
    [incident] = incidents(run)
    return incident


def test_a_crash_before_the_next_save_forgets_nothing(tmp_path):
    """The batch is not met again, and all others come in their order."""
    incident = crashed(tmp_path / "crashed")
    skipped = incident.known_details().skipped
    assert (skipped.last, skipped.draws[0][3]) == (8, HOT)
    used = train(tmp_path / "crashed")
    assert len(incidents(tmp_path / "crashed")) == 1
    whole = train(tmp_path / "whole")
    assert used == {step: number for step, number in whole.items() if step > 5}
    assert HOT not in used.values()


def test_taking_it_up_again_changes_nothing(tmp_path):
    """Any number of crashes and resumes: the same batches, and one incident."""
    crashed(tmp_path)
    for _ in range(2):
        with pytest.raises(Crash):
            train(tmp_path, crash_at=10)
    used = train(tmp_path)
    assert len(incidents(tmp_path)) == 1
    assert HOT not in used.values()
    before = max(used.values())
    assert list(train(tmp_path, total=16).values()) == [before + 1, before + 2]


def rewrite(run, incident, change):
    """Have a newest revision of an incident that is changed so."""
    path = Path(open_run(str(run)).records.root) / incident_key(incident.id, incident.revision)
    record = json.loads(path.read_text(encoding="utf-8"))
    change(record)
    path.write_text(json.dumps(record), encoding="utf-8")


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["details"]["skipped"].update(check="00000000"),
        lambda r: r["details"]["skipped"].update(last=9),
        lambda r: r["details"]["skipped"].update(draws=[[0, 0, 0, 39]]),
        lambda r: r["details"]["skipped"].update(draws=[[0, 0, 6, 10**12]]),
        lambda r: r["details"]["skipped"].update(draws=[[-1, 0, 6, 7]]),
        lambda r: r["details"]["skipped"].update(draws="all"),
        lambda r: r["details"]["skipped"].pop("training"),
        lambda r: r.update(source="callback"),
        lambda r: r.update(step=None),
        lambda r: r.clear(),
    ],
)
def test_a_record_that_is_not_ours_leaves_out_nothing(tmp_path, change):
    """Rotten, hostile, or of somebody else: the batch is met again, and nothing but it is ever left out."""
    rewrite(tmp_path, crashed(tmp_path), change)
    known = len(incidents(tmp_path))
    used = train(tmp_path)
    assert len(incidents(tmp_path)) == known + 1
    assert set(range(14)) - {HOT, HOT - 1} <= set(used.values()) | set(range(5))


def test_another_training_counts_its_data_otherwise(tmp_path):
    """A training that began anew in the same records leaves out nothing that a former one did."""
    crashed(tmp_path / "run")
    for found in (tmp_path / "run").glob("step-*"):
        for file in found.iterdir():
            file.unlink()
        found.rmdir()
    used = train(tmp_path / "run", total=6)
    assert sorted(used.values()) == list(range(6))


def test_what_is_recorded_is_bounded():
    """Batches in a row are one entry; updates without end are not recorded."""
    by_rank = [[[u, 0, u - 1] for u in range(1, 2000)], [[u, 1, u] for u in (5, 6, 9)]]
    found = skipped_of(5, 1500, Drawn(training="a" * 32, by_rank=by_rank))
    assert found.draws == ((0, 0, 4, 1499), (1, 1, 5, 6), (1, 1, 9, 9))
    assert skipped_of(1, MOST_UPDATES + 1, None) is None


@pytest.fixture
def run(tmp_path):
    """A run of another layout with sealed checkpoints."""
    for step in (80, 90):
        write_torch(tmp_path, step, seed=step)
    opened = open_run(str(tmp_path))
    reconcile(opened, QUICK, Watch())
    return opened


@pytest.fixture
def saved(run):
    """record(first, last, known_good) tells of an incident in it."""

    def record(first, last, known_good, skipped=None):
        incident = open_incident(run, step=last, cause="weights", reason="r", evidence={}, source="guard")
        details = Details(skipped=skipped or skipped_of(first, last, None))
        return update_incident(run, incident, state="closed", known_good=known_good, details=details)

    return record


def test_updates_that_a_framework_counts(run, saved):
    """Those to come, of incidents on the way on which the series is; a second rollback explains a step saved anew."""
    series = "net-#.pt"
    assert updates_left_out(run, series, after=90) == []
    saved(98, 100, "90.1")
    assert updates_left_out(run, series, after=90) == [98, 99, 100]
    assert updates_left_out(run, series, after=99) == [100]
    assert updates_left_out(run, series, after=100) == []
    assert updates_left_out(run, series, after=80) == []  # it went back to a later one than this
    saved(96, 96, "90.7")  # a generation that is not there
    assert updates_left_out(run, series, after=90) == [98, 99, 100]
    saved(95, 95, "80.1")
    assert updates_left_out(run, series, after=80) == [95, 96, 98, 99, 100]
    saved(88, 97, "80.1", skipped_of(88, 10**4 + 87, None))  # beyond where it was noticed
    assert updates_left_out(run, series, after=90) == [95, 96, 98, 99, 100]


def test_each_rank_leaves_out_its_own_batches(run):
    """Rank 0 reads and tells the others; a record of another number of ranks says nothing to them."""
    token = "a" * 32
    drawn = Drawn(training=token, by_rank=[[[98, 0, 97]], [[98, 1, 3]]])
    incident = open_incident(run, step=98, cause="weights", reason="r", evidence={}, source="guard")
    update_incident(run, incident, details=Details(skipped=skipped_of(98, 98, drawn)))

    class Two:
        size, told = 2, None

        def __init__(self, rank):
            self.rank = rank

        def tell(self, value):
            Two.told = value if self.rank == 0 else Two.told
            return Two.told

    def extra():
        return {"guard": {"training": token}, "data": {"skipped": [(0, 1)]}}

    found = [extra(), extra()]
    for rank in range(2):
        leave_out_again(run, Two(rank), found[rank])
    assert [e["data"]["skipped"] for e in found] == [[(0, 1), (0, 97)], [(0, 1), (1, 3)]]
    alone = extra()
    leave_out_again(run, OneRank(), alone)
    assert alone == extra()
    nothing = {"guard": {"training": token}}
    leave_out_again(run, Two(0), nothing)
    assert "data" not in nothing
