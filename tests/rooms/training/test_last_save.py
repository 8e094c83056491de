"""The last save has its verdict when training ends, without `close`; or one sentence says which command gives it."""

import logging

import pytest
import torch
from click.testing import CliRunner
from support.guards import guard_of
from support.last_saves import recorded_outcome_of_last
from support.views import look

from ckptguard.cli.entry import commands
from ckptguard.errors import CouldNotTellError
from ckptguard.integrations.guarded_run import FrameworkStore
from ckptguard.records.run import open_run
from ckptguard.training.options import Saving
from ckptguard.training.rollback import last_save
from ckptguard.training.rollback.last_save import judge_last_save
from ckptguard.values.verdict import Outcome
from ckptguard.verification.checkpoint import verify_checkpoint


def outcomes(run):
    """Path -> what the records say of each checkpoint in place; None where they say nothing."""
    view = look(open_run(str(run)))
    verdicts = {c.path: view.history.verdict(view.current(c)) if view.current(c) else None for c in view.checkpoints}
    return {path: verdict and verdict.outcome for path, verdict in verdicts.items()}


def train(guard):
    """The README's loop: it ends, and nobody closes anything."""
    for _ in guard.steps([1, 2, 3, 4], total=4, save_every=2):
        guard.observe(loss=1.0)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_loop_that_ends_leaves_a_verdict(tmp_path, blocking):
    """Of the last save, in the guard's own layout, also where it is written behind training."""
    train(guard_of(tmp_path, saving=Saving(blocking=blocking)))
    assert recorded_outcome_of_last(tmp_path) is Outcome.GOOD


def test_files_of_the_users_own(tmp_path):
    """The same with `save=` and `load=`."""
    model = torch.nn.Linear(3, 2)
    guard = guard_of(
        tmp_path,
        model,
        save=lambda path, step: torch.save(model.state_dict(), path),
        load=lambda path: model.load_state_dict(torch.load(path)),
    )
    train(guard)
    assert outcomes(tmp_path)["step-4.pt"] is Outcome.GOOD


def test_a_loop_that_is_left_waits_for_nothing(tmp_path, monkeypatch):
    """After a `break` training may go on."""
    monkeypatch.setattr(last_save, "judge_last_save", lambda *a, **k: pytest.fail("it was judged"))
    guard = guard_of(tmp_path)
    for _ in guard.steps([1, 2, 3, 4], total=4, save_every=2):
        guard.observe(loss=1.0)
        break


def save(folder, step, value=1.0):
    """A file of a run."""
    torch.save({"model": {"w": torch.full((4, 4), value), "v": torch.randn(3, 3)}}, folder / f"net-{step}.pt")


def judge(folder, **how):
    """Have the last save judged."""
    store = FrameworkStore(lambda: "net-#.pt")
    judge_last_save(look(open_run(str(folder))), store, **({"daemon": None} | how))


def test_only_the_last_one_is_read(tmp_path, monkeypatch):
    """And what has its verdict is not read again."""
    for step in (9, 10):
        save(tmp_path, step)
    read = []
    monkeypatch.setattr(
        last_save, "verify_checkpoint", lambda v, c, **k: read.append(c.path) or verify_checkpoint(v, c, **k)
    )
    judge(tmp_path)
    judge(tmp_path)
    assert read == ["net-10.pt"]
    assert outcomes(tmp_path) == {"net-10.pt": Outcome.GOOD, "net-9.pt": None}


def test_a_daemon_is_asked_first(tmp_path, monkeypatch):
    """What it judged in time is not read here; what it did not judge is."""
    asked = []

    def daemon(run, *, before_step, series, wait_seconds):
        asked.append((series, wait_seconds))
        if wait_seconds == 3.0:
            verify_checkpoint(look(run), look(run).checkpoint("net-1.pt"))

    save(tmp_path, 1)
    monkeypatch.setattr(last_save, "let_daemon_verify", daemon)
    with monkeypatch.context() as quick:
        quick.setattr(last_save, "verify_checkpoint", lambda *a, **k: pytest.fail("it was read here"))
        judge(tmp_path, daemon=3.0)
    save(tmp_path, 2)
    judge(tmp_path, daemon=1.0)
    assert asked == [("net-#.pt", 3.0), ("net-#.pt", 1.0)]
    assert outcomes(tmp_path)["net-2.pt"] is Outcome.GOOD


def test_a_bad_last_save_is_said(tmp_path, caplog):
    """People ship it."""
    save(tmp_path, 1, float("nan"))
    judge(tmp_path)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    message = record.getMessage()
    assert message.startswith("ckptguard: the last save is bad; see why with: ckptguard show ")
    assert CliRunner().invoke(commands, ["show", message.rpartition(" ")[2]]).exit_code == 0
    assert str(tmp_path) in message


@pytest.mark.parametrize("trouble", [CouldNotTellError("the disk is full"), OSError(5, "input/output error"), None])
def test_without_a_verdict_one_sentence_says_the_command(tmp_path, monkeypatch, caplog, trouble):
    """Nothing is raised. Without trouble, but with other ranks waiting, it is given up in time."""
    save(tmp_path, 1)
    if trouble is not None:

        def fail(*arguments, **named):
            raise trouble

        monkeypatch.setattr(last_save, "verify_checkpoint", fail)
    judge(tmp_path, seconds=-1.0)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(f"run ckptguard verify {tmp_path}")
    assert outcomes(tmp_path) == {"net-1.pt": None}


def test_an_empty_run_is_no_trouble(tmp_path, caplog):
    """Nothing was saved."""
    judge(tmp_path)
    assert caplog.records == []
