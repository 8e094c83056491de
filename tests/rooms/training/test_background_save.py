"""Saves behind training: a consistent copy, sealed or never good, and never silent about what went wrong."""

import os
import threading
from pathlib import Path

import pytest
import torch
from support.guards import fill_disk, guard_of
from support.runs import QUICK
from support.views import look

import ckptguard
from ckptguard.errors import SettingsError, SickTrainingError, StorageFullError
from ckptguard.inspect.list_states import survey
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.training.saving import destinations, own_layout
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

BEHIND = ckptguard.Saving(blocking=False)


class Held:
    """Saves stop before a function that a save calls until they are let go."""

    def __init__(self, monkeypatch, name="write_tensors", module=own_layout):
        self.reached, self.let_go = threading.Event(), threading.Event()
        real = getattr(module, name)

        def wait_first(*args, **options):
            self.reached.set()
            assert self.let_go.wait(60)
            return real(*args, **options)

        monkeypatch.setattr(module, name, wait_first)


def outcomes(run):
    """Path -> outcome of everything that lies in a run."""
    return {c.path: c.outcome for c in verify_target(str(run), QUICK).checkpoints}


def trained(rows=3):
    """A model with buffers, tied weights and another dtype, and AdamW after one update."""
    torch.manual_seed(rows)
    model = torch.nn.Sequential(
        torch.nn.Linear(rows, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    )
    model[3].weight = model[2].weight
    model.register_buffer("brain", torch.randn(5).bfloat16())
    model.register_buffer("gaps", torch.randn(6, 4).t())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, rows)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def tensors(model, optimizer):
    """A copy of every tensor there is."""
    found = {n: t.clone() for n, t in model.state_dict().items()}
    for number, state in enumerate(optimizer.state.values()):
        found |= {f"{number}.{k}": v.clone() for k, v in state.items()}
    return found


def test_a_save_is_of_the_moment_when_it_was_called(tmp_path, monkeypatch):
    """What training writes into its tensors right after the call is not in the checkpoint, bit for bit."""
    model, optimizer = trained()
    guard = ckptguard.TrainingGuard(tmp_path / "run", model=model, optimizer=optimizer, daemon="off", settings=QUICK)
    before = tensors(model, optimizer)
    held = Held(monkeypatch)
    path = guard.save(step=5, blocking=False)
    with torch.no_grad():
        for tensor in [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]:
            tensor.fill_(77)
    optimizer.param_groups[0]["lr"] = 0.5
    assert held.reached.wait(60)
    assert not os.path.exists(path)
    held.let_go.set()
    assert guard.wait_for_save()
    assert guard.resume() == 5
    after = tensors(model, optimizer)
    assert [n for n in before if not torch.equal(before[n], after[n])] == []
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert model[3].weight.data_ptr() == model[2].weight.data_ptr()
    assert outcomes(tmp_path / "run") == {"step-000000005": Outcome.GOOD}


def test_both_ways_write_the_same_bytes(tmp_path):
    """A checkpoint does not tell how it was saved."""
    model, optimizer = trained()
    guard = ckptguard.TrainingGuard(tmp_path / "run", model=model, optimizer=optimizer, daemon="off", settings=QUICK)
    one = Path(guard.save(step=1))
    two = Path(guard.save(step=2, blocking=False))
    assert guard.wait_for_save()
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_the_memory_of_the_copy_is_used_again(tmp_path):
    """There is one copy, however often is saved; it only grows."""
    model, optimizer = trained()
    guard = ckptguard.TrainingGuard(tmp_path / "run", model=model, optimizer=optimizer, daemon="off", settings=QUICK)
    places = set()
    for step in range(3):
        guard.save(step=step, blocking=False)
        places.add(guard._store._host._memory.data_ptr())
    assert guard.wait_for_save()
    assert len(places) == 1


def test_one_save_at_a_time(tmp_path, monkeypatch):
    """A second save waits for the first; both are whole, each of its own moment."""
    model = torch.nn.Linear(4, 4)
    guard = guard_of(tmp_path / "run", model)
    held = Held(monkeypatch)
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(step)
        if step == 2:
            threading.Timer(0.05, held.let_go.set).start()
        guard.save(step=step, blocking=False)
        assert step == 1 or held.let_go.is_set()
    guard.wait_for_save()
    assert outcomes(tmp_path / "run") == {f"step-{n:09d}": Outcome.GOOD for n in (1, 2)}
    assert guard.resume() == 2
    assert model.weight.unique().tolist() == [2.0]


@pytest.mark.parametrize(("when_busy", "saved"), [("skip", (0, 1, 6)), ("wait", (0, 1, 2, 3, 4, 5, 6))])
def test_automatic_saves_wait_or_are_left_out(tmp_path, monkeypatch, when_busy, saved):
    """With "skip" training never waits, except for its first save and its last one."""
    with guard_of(tmp_path / "run", saving=ckptguard.Saving(blocking=False, when_busy=when_busy)) as guard:
        for step, _ in guard.steps([1], total=6, save_every=1):
            if step == 1:
                held = Held(monkeypatch)
            if step == (6 if when_busy == "skip" else 1):
                held.let_go.set()
    assert set(outcomes(tmp_path / "run")) == {f"step-{n:09d}" for n in saved}


def test_a_full_disk_is_told_at_once_and_raised_by_the_next_call(tmp_path, monkeypatch, caplog):
    """The call has returned when the disk is full: an incident is on record, nothing is left, the next call raises."""
    guard = guard_of(tmp_path / "run")
    guard.save(step=1)
    with monkeypatch.context() as patched:
        fill_disk(patched, after=10_000)
        guard.save(step=2, blocking=False)
        assert guard._saving.wait(60)
    assert "step 2 could not be saved" in caplog.text
    (incident,) = list_incidents(open_run(str(tmp_path / "run")))
    assert (incident.step, incident.cause) == (2, "storage")
    assert [p.name for p in (tmp_path / "run").glob("*step*")] == ["step-000000001"]
    with pytest.raises(StorageFullError):
        guard.save(step=3)
    guard.save(step=3)
    assert guard.resume() == 3
    guard.close()


@pytest.mark.parametrize("how", ["wait_for_save", "close"])
def test_a_failure_surfaces_where_nothing_is_saved_any_more(tmp_path, monkeypatch, how):
    """Waiting and closing raise it as well, once."""
    guard = guard_of(tmp_path / "run")
    with monkeypatch.context() as patched:
        fill_disk(patched, after=0)
        guard.save(step=2, blocking=False)
        with pytest.raises(StorageFullError):
            getattr(guard, how)()
    guard.close()


@pytest.mark.parametrize("blocking", [True, False])
def test_an_automatic_save_that_fails_does_not_end_training(tmp_path, monkeypatch, caplog, blocking):
    """It goes on, loudly, with an incident on record; the next save succeeds, and close() does not raise."""
    with guard_of(tmp_path / "run", saving=ckptguard.Saving(blocking=blocking)) as guard:
        for step, _ in guard.steps([1, 2, 3], total=6, save_every=2):
            if step in (4, 5):
                guard.wait_for_save()
                monkeypatch.undo()
            if step == 4:
                fill_disk(monkeypatch, after=100)
    assert outcomes(tmp_path / "run") == {f"step-{n:09d}": Outcome.GOOD for n in (0, 2, 6)}
    (incident,) = list_incidents(open_run(str(tmp_path / "run")))
    assert (incident.step, incident.cause, incident.state) == (4, "storage", "closed")
    assert "could not be saved" in caplog.text


def test_a_rollback_waits_for_the_save_in_flight(tmp_path, monkeypatch):
    """It is sealed first, so that the rollback may choose it."""
    model = torch.nn.Linear(4, 4)
    guard = guard_of(tmp_path / "run", model)
    with torch.no_grad():
        model.weight.fill_(1)
    guard.save(step=1)
    held = Held(monkeypatch)
    with torch.no_grad():
        model.weight.fill_(2)
    guard.save(step=2, blocking=False)
    with torch.no_grad():
        model.weight.fill_(3)
    threading.Timer(0.05, held.let_go.set).start()
    assert guard.rollback() == 2
    assert model.weight.unique().tolist() == [2.0]


@pytest.mark.parametrize("stuck_in", ["write_tensors", "sync_folder", "make_room", "seal_written"])
def test_a_rollback_abandons_a_save_that_is_stuck(tmp_path, monkeypatch, stuck_in):
    """Past the deadline the save never counts, wherever it was stuck, also when it comes loose afterwards."""
    model = torch.nn.Linear(4, 4)
    guard = guard_of(tmp_path / "run", model, deadlines=ckptguard.Deadlines(daemon=0.05))
    guard.save(step=1)
    with monkeypatch.context() as patched:
        held = Held(patched, stuck_in, own_layout if stuck_in == "write_tensors" else destinations)
        guard.save(step=2, blocking=False)
        in_flight = guard._saving._in_flight
        assert held.reached.wait(60)
        assert guard.rollback() == 1
        assert guard.wait_for_save(0)
        held.let_go.set()
        assert in_flight.wait(60)
    assert {str(s.id): s.outcome for s in survey(look(str(tmp_path / "run"))) if s.in_place} == {"1.1": Outcome.GOOD}
    others = {s.outcome for s in survey(look(str(tmp_path / "run"))) if str(s.id) != "1.1"}
    assert others <= {Outcome.SUSPECT, Outcome.INCOMPLETE}
    assert [p.name for p in (tmp_path / "run").glob("*step*")] == ["step-000000001"]
    assert guard.resume() == 1
    guard.save(step=2, blocking=False)
    guard.wait_for_save()
    assert guard.resume() == 2
    assert "abandoned" in " ".join(i.reason for i in list_incidents(open_run(str(tmp_path / "run"))))


def test_an_exception_in_the_training_loop_does_not_lose_the_save(tmp_path, monkeypatch):
    """Leaving the guard waits for what is in flight; the exception is the caller's own."""

    def train():
        with guard_of(tmp_path / "run", saving=BEHIND) as guard:
            for step, _ in guard.steps([1], total=6, save_every=2):
                if step == 1:
                    held = Held(monkeypatch)
                if step == 3:
                    threading.Timer(0.05, held.let_go.set).start()
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert set(outcomes(tmp_path / "run")) == {"step-000000000", "step-000000002"}


def test_the_users_own_files_cannot_be_saved_behind_training(tmp_path):
    """Their save reads the live state; that is said at construction or at the call."""
    options = {"save": lambda path, step: torch.save({}, path), "load": lambda path: None}
    with pytest.raises(SettingsError, match="in the background"):
        guard_of(tmp_path / "run", saving=BEHIND, **options)
    with pytest.raises(SettingsError, match="in the background"):
        guard_of(tmp_path / "run", **options).save(step=1, blocking=False)
    with pytest.raises(SettingsError, match="when_busy"):
        ckptguard.Saving(when_busy="maybe")


def test_no_memory_for_a_copy_makes_it_a_save_that_blocks(tmp_path, monkeypatch, caplog):
    """The checkpoint is there all the same, and the log says why it took longer."""
    guard = guard_of(tmp_path / "run")

    def no_room(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setattr("ckptguard.training.content.host_copy._allocated", no_room)
    guard.save(step=1, blocking=False)
    assert outcomes(tmp_path / "run") == {"step-000000001": Outcome.GOOD}
    assert "while training waits" in caplog.text


def test_a_forked_process_waits_for_nobody_and_holds_nothing(tmp_path, monkeypatch):
    """A data loader's worker that is forked while a save is in flight has no save, and no lock of the run."""
    guard = guard_of(tmp_path / "run")
    guard.save(step=3)
    held = Held(monkeypatch, "quarantine", destinations)
    guard.save(step=3, blocking=False)
    assert held.reached.wait(60)
    go, end = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(go[1], b"1" if guard.wait_for_save() else b"0")
            os.read(end[0], 1)
        finally:
            os._exit(0)
    assert os.read(go[0], 1) == b"1"
    held.let_go.set()
    assert guard.wait_for_save(60)
    guard.save(step=3)  # needs the lock
    os.write(end[1], b"x")
    os.waitpid(child, 0)
    assert guard.resume() == 3


def test_a_poisoned_copy_is_never_sealed(tmp_path):
    """The call returns without having looked; what it copied is looked at, not saved, and told."""
    model = torch.nn.Linear(4, 4)
    guard = guard_of(tmp_path / "run", model)
    guard.save(step=1)
    with torch.no_grad():
        model.weight[0, 0] = float("inf")
    guard.save(step=2, blocking=False)
    with pytest.raises(SickTrainingError, match="weight holds NaN or infinity"):
        guard.wait_for_save()
    assert outcomes(tmp_path / "run") == {"step-000000001": Outcome.GOOD}
    (incident,) = list_incidents(open_run(str(tmp_path / "run")))
    assert (incident.step, incident.cause) == (2, "weights")


def test_a_poisoned_copy_takes_training_back(tmp_path):
    """Inside of steps() what was found in the copy leads to a look at training, and to a rollback."""
    model = torch.nn.Linear(4, 4)
    seen = []
    with guard_of(tmp_path / "run", model, policy=ckptguard.RollbackPolicy(check_every=1000)) as guard:
        for step, _ in guard.steps([1], total=4, save_every=100):
            seen.append(step)
            if len(seen) == 2:
                with torch.no_grad():
                    model.weight[0, 0] = float("nan")
                guard.save(blocking=False)
                guard._saving.wait(60)
                guard._saving._unheard.clear()
    assert seen == [1, 2, 1, 2, 3, 4]
    assert bool(model.weight.isfinite().all())


def test_an_abandoned_save_leaves_a_later_one_of_its_step_alone(tmp_path, monkeypatch):
    """It slept while training came by the same step again; when it wakes it takes nothing with it."""
    guard = guard_of(tmp_path / "run")
    real, held = destinations.as_stored, Held(monkeypatch, "as_stored", destinations)
    guard.save(5, blocking=False)
    assert held.reached.wait(60)
    [thread] = [t for t in threading.enumerate() if t.name == "ckptguard-save-5"]
    guard._saving.drain(0)  # what a rollback does at its deadline
    monkeypatch.setattr(destinations, "as_stored", real)
    guard.save(5)
    held.let_go.set()
    thread.join()
    assert (tmp_path / "run" / "step-000000005").is_dir()
    assert outcomes(tmp_path / "run") == {"step-000000005": Outcome.GOOD}
