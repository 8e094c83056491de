"""The disk of a training is lost: it goes on from its replica, bit for bit as if nothing had happened."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.runs import QUICK
from support.tiny_training import Training, assert_same
from support.views import look

import ckptguard
from ckptguard.cli.entry import commands
from ckptguard.errors import StoppedError, StorageFullError
from ckptguard.records.run import open_run
from ckptguard.recover.roll_back import GoBack, roll_back
from ckptguard.replicas.replicate import replicate
from ckptguard.replicas.start_run import regain, regain_before
from ckptguard.runs.find_known_good import Wanted
from ckptguard.upkeep.reconcile import PassNotes, reconcile


def options_of(training, own):
    """How a guard saves: its own files, or the user's."""
    if own:
        return {}

    def save(path, step):
        parts = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        torch.save({**parts, "scheduler": training.scheduler.state_dict(), "step": step}, path)

    def load(path):
        state = torch.load(path)
        for name in ("model", "optimizer", "scheduler"):
            getattr(training, name).load_state_dict(state[name])

    return {"save": save, "load": load}


def train(training, run, total, own, **more):
    """Train under a guard, and have what was saved verified; returns the steps taken."""
    taken = []
    options = {**training.parts(), **options_of(training, own), **more}
    with ckptguard.TrainingGuard(run, **options, daemon="off", settings=QUICK) as guard:
        for step, batch in guard.steps(training.loader, total=total, save_every=4):
            taken.append(step)
            loss, norm = training.update(step, batch)
            guard.observe(loss=loss, grad_norm=norm)
    reconcile(look(open_run(str(run))), PassNotes())
    return taken


@pytest.mark.parametrize(
    ("own", "way", "url"),
    [
        (True, "one command", "local"),
        (True, "the guard itself", "memory://lost-disk"),
        (False, "one command", "memory://lost-disk"),
        (False, "the guard itself", "local"),
    ],
)
def test_training_goes_on_from_the_replica(tmp_path, own, way, url):
    """Trained to 12, replicated, the folder deleted: it takes steps 13 to 20, with the losses and tensors of a training
    that was never interrupted."""
    replica = f"{url}/{way.replace(' ', '-')}-{own}" if "://" in url else str(tmp_path / "replica")
    healthy = Training()
    train(healthy, tmp_path / "healthy", 20, own)
    first = Training()
    train(first, tmp_path / "run", 12, own)
    assert str(replicate(look(str(tmp_path / "run")), replica).last_good) == "12.1"
    shutil.rmtree(tmp_path / "run")
    replicas = {}
    if way == "one command":
        place = str(tmp_path / "run")
        done = CliRunner().invoke(commands, ["restore", replica, "--as-run", place], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    else:
        replicas = {"saving": ckptguard.Saving(replicas=replica)}
    second = Training(seed=99)
    assert train(second, tmp_path / "run", 20, own, **replicas) == list(range(13, 21))
    second.losses = {**first.losses, **second.losses}
    assert_same(healthy, second)
    again = replicate(look(str(tmp_path / "run")), replica)
    assert (again.behind, str(again.last_good), again.trouble) == (0, "20.1", None)


def lose(run):
    """Remove everything that was saved, in place and kept; what is on record stays."""
    for path in Path(run).glob("step-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(run / "_ckptguard" / "kept")


def rot(run):
    """Damage everything that was saved, behind the back of its verdicts."""
    for path in [
        p
        for p in Path(run).rglob("*")
        if p.is_file() and p.name.removesuffix(".held").endswith((".safetensors", ".pt"))
    ]:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.unlink()
        path.write_bytes(raw)


def go_back_at(training, run, own, step, before, **more):
    """Train to 20; at `step`, after `before` was called, a NaN. Returns the steps taken."""
    taken, harmed = [], False
    options = {**training.parts(), **options_of(training, own), **more}
    policy = ckptguard.RollbackPolicy(skip=False)
    with ckptguard.TrainingGuard(run, **options, daemon="off", settings=QUICK, policy=policy) as guard:
        for now, batch in guard.steps(training.loader, total=20, save_every=4):
            taken.append(now)
            loss, norm = training.update(now, batch)
            if now == step and not harmed:
                before()
                norm, harmed = norm * float("nan"), True
            guard.observe(loss=loss, grad_norm=norm)
    return taken


@pytest.mark.parametrize(("own", "trouble"), [(True, rot), (False, lose)])
def test_a_rollback_finds_the_replica_when_nothing_good_is_left(tmp_path, own, trouble, caplog):
    """At step 14 a NaN, and the disk turns out to have lost all: back to 12 from the replica, and on to 20 as if
    nothing had happened. What was saved later than the onset stays sick everywhere."""
    run, replica = tmp_path / "run", str(tmp_path / "replica")
    healthy = Training()
    train(healthy, tmp_path / "healthy", 20, own)
    training = Training()

    def before():
        reconcile(look(open_run(str(run))), PassNotes())
        assert str(replicate(look(str(run)), replica).last_good) == "12.1"
        trouble(run)

    assert go_back_at(training, run, own, 14, before, saving=ckptguard.Saving(replicas=replica)) == [
        *range(1, 15),
        *range(13, 21),
    ]
    assert_same(healthy, training)
    assert "was copied from" in caplog.text


def test_what_a_replica_gave_back_need_not_be_recorded(tmp_path, monkeypatch):
    """No verdict can be written in the run, before and after the replica was asked: training goes back all the same."""
    run, replica = tmp_path / "run", str(tmp_path / "replica")
    asked = []

    def full(*_, **__):
        asked.append(1)
        raise StorageFullError("no space left", key="")

    def before():
        reconcile(look(open_run(str(run))), PassNotes())
        replicate(look(str(run)), replica)
        monkeypatch.setattr("ckptguard.training.rollback.load_known_good.go_back", full)

    taken = go_back_at(Training(), run, True, 14, before, saving=ckptguard.Saving(replicas=replica))
    assert taken == [*range(1, 15), *range(13, 21)]
    assert len(asked) == 2


def test_what_was_saved_in_sickness_does_not_come_back_from_the_replica(tmp_path):
    """Sick since step 11: 12 lies in the replica alone, and is no place to resume at afterwards."""
    run, replica = tmp_path / "run", str(tmp_path / "replica")
    train(Training(), run, 12, own=True, saving=ckptguard.Saving(replicas=replica))
    assert str(replicate(look(str(run)), replica).last_good) == "12.1"
    lose(run)
    settings = QUICK.changed(replicas=(replica,))
    view = look(str(run), settings)
    assert str(regain_before(view, Wanted(before_step=11, series="step-#")).id) == "8.1"
    rolled = roll_back(view, GoBack(reason="sick since 11", before_step=11, check_writing=False))
    assert str(rolled.known_good.id) == "8.1"
    assert regain(look(str(run), settings)) is None
    training = Training()
    with ckptguard.TrainingGuard(run, **training.parts(), daemon="off", settings=settings) as guard:
        assert guard.resume() == 8


def test_a_fetch_that_takes_too_long_is_called_off(tmp_path):
    """Other ranks wait for it: it ends when it is told to, and nothing half is left in place."""
    run, replica = tmp_path / "run", str(tmp_path / "replica")
    train(Training(), run, 12, own=True)
    replicate(look(str(run)), replica)
    lose(run)
    stop = threading.Event()
    stop.set()
    view = look(str(run), QUICK.changed(replicas=(replica,)))
    with pytest.raises(StoppedError):
        regain_before(view, Wanted(before_step=20, series="step-#"), stop=stop)
    assert not list(run.glob("step-*/*.safetensors"))
