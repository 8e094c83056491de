"""The disk of a training is lost: it goes on from its replica, bit for bit as if nothing had happened."""

import shutil

import pytest
import torch
from click.testing import CliRunner
from fixtures_runs import QUICK
from tiny_training import Training, assert_same

import ckptguard
from ckptguard.cli.entry import commands
from ckptguard.operations.reconcile import Watch, reconcile
from ckptguard.operations.replicate import replicate
from ckptguard.records.run import open_run


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
    reconcile(open_run(str(run)), QUICK, Watch())
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
    assert replicate(open_run(str(tmp_path / "run")), QUICK, replica).last_good == "12.1"
    shutil.rmtree(tmp_path / "run")
    replicas = {}
    if way == "one command":
        place = str(tmp_path / "run")
        done = CliRunner().invoke(commands, ["restore", replica, "--as-run", place], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    else:
        replicas = {"replicas": replica}
    second = Training(seed=99)
    assert train(second, tmp_path / "run", 20, own, **replicas) == list(range(13, 21))
    second.losses = {**first.losses, **second.losses}
    assert_same(healthy, second)
    again = replicate(open_run(str(tmp_path / "run")), QUICK, replica)
    assert (again.behind, again.last_good, again.trouble) == (0, "20.1", None)
