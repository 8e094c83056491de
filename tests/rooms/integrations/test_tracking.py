"""Verdicts and incidents in trackers: the installed libraries, offline, and trackers that fail."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.daemon_process import until
from support.runs import write_torch
from support.views import look

import ckptguard
from ckptguard.errors import SettingsError
from ckptguard.integrations import tracking
from ckptguard.integrations.tracking import follow
from ckptguard.records.incidents import open_incident
from ckptguard.records.silences import end_silence, silence_run
from ckptguard.values.settings import Settings
from ckptguard.verification.checkpoint import verify_checkpoint

QUICK = Settings(settle=0.0, scan_interval=0.02)


def verify(run, step):
    """Give a verdict."""
    verify_checkpoint(look(run), look(run).checkpoint(f"net-{step}.pt"))


def poison(root, run, step):
    """A save with NaN, and its verdict."""
    torch.save({"w": torch.full((64,), float("nan"))}, root / f"net-{step}.pt")
    verify(run, step)


@pytest.fixture
def eventful(root, run):
    """A good save, a bad one, and an incident."""
    write_torch(root, 100, seed=1)
    verify(run, 100)
    poison(root, run, 200)
    open_incident(run, step=150, cause="numeric", reason="the loss is NaN", evidence={}, source="guard")
    return run


class Writer:
    """A SummaryWriter that notes what it is told, and fails as often as it is asked to."""

    def __init__(self, failures=0):
        self.failures, self.scalars, self.texts, self.flushed = failures, [], [], 0

    def add_scalar(self, tag, value, step):
        """A point."""
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no room")
        self.scalars.append((step, value))

    def add_text(self, tag, text, step):
        """A text."""
        self.texts.append((tag, step, text))

    def flush(self):
        """Counted."""
        self.flushed += 1


def test_what_comes_later_is_written_too(root, run, eventful):
    """A verdict that changes, and a new incident; nothing twice."""
    writer = Writer()
    with follow(root, tensorboard=writer, settings=QUICK):
        until(lambda: len(writer.texts) == 2, "what is on record")
        assert (writer.scalars, {tag for tag, _, _ in writer.texts}) == (
            [(100, 1.0), (200, 0.0)],
            {"ckptguard/verdict", "ckptguard/incident"},
        )
        poison(root, run, 300)
        until(lambda: len(writer.texts) == 3, "the third")
    assert writer.scalars[2:] == [(300, 0.0)]
    assert writer.texts[2][1] == 300
    assert "net-300.pt is bad" in writer.texts[2][2]


def test_a_tracker_that_fails_is_told_later_and_the_others_now(root, run, eventful, caplog):
    """A failure is one warning; nothing is lost by it, and nothing is raised."""
    one, other = Writer(failures=3), Writer()
    with (
        follow(root, tensorboard=one, settings=QUICK) as first,
        follow(root, tensorboard=other, settings=QUICK),
    ):
        until(lambda: one.texts and other.texts, "both")
        assert first._thread.daemon
    assert one.scalars == other.scalars == [(100, 1.0), (200, 0.0)]
    assert [r.levelname for r in caplog.records if "was not told" in r.message] == ["WARNING"]


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path):
    """Following may begin before training makes the folder; nothing is made by it."""
    writer = Writer()
    with follow(tmp_path / "later", tensorboard=writer, settings=QUICK):
        pass
    assert (writer.scalars, list(tmp_path.iterdir())) == ([], [])


def test_only_the_first_rank_writes(root, eventful, monkeypatch):
    """A tracker of another rank may be None, as wandb's run is there."""
    writer = Writer()
    monkeypatch.setenv("RANK", "1")
    follow(root, tensorboard=writer, settings=QUICK).close()
    follow(root, wandb=None, settings=QUICK).close()
    assert writer.scalars == []
    monkeypatch.delenv("RANK")
    with pytest.raises(SettingsError):
        follow(root)


def test_it_is_reached_as_the_guides_say():
    """By the package's own name."""
    assert ckptguard.integrations.tracking is tracking


def test_tensorboard_shows_it(root, eventful, tmp_path):
    """The curve, and the texts, as TensorBoard itself reads them."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "logs"))
    with follow(root, tensorboard=writer, settings=QUICK):
        pass
    writer.close()
    read = EventAccumulator(str(tmp_path / "logs")).Reload()
    points = [(point.step, point.value) for point in read.Scalars("ckptguard/checkpoint_is_good")]
    assert points == [(100, 1.0), (200, 0.0)]
    [text] = read.Tensors("ckptguard/verdict/text_summary")
    assert (text.step, b"net-200.pt is bad" in text.tensor_proto.string_val[0]) == (200, True)
    assert read.Tensors("ckptguard/incident/text_summary")[0].step == 150


def test_wandb_shows_it(root, run, eventful, tmp_path, monkeypatch):
    """The summary and the tags; an alert for what is new, and no row of the history."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracked = wandb.init(mode="offline", project="x", dir=str(tmp_path))
    with follow(root, wandb=tracked, settings=QUICK):
        until(lambda: tracked.tags, "the tags")
        poison(root, run, 300)
        until(lambda: tracked.summary.get("ckptguard/checkpoints_not_good") == 2, "the new one")
    assert tracked.summary["ckptguard/known_good"].endswith("net-100.pt")
    assert set(tracked.tags) == {"ckptguard: bad", "ckptguard: incident"}
    assert tracked.step == 0
    tracked.finish()
    [written] = [p for p in tmp_path.rglob("*.wandb") if not p.parent.is_symlink()]
    until(lambda: b"net-300.pt is bad" in written.read_bytes(), "the alert")  # another process writes it
    assert b"net-200.pt is bad" not in written.read_bytes()


def test_wandb_alerts_nobody_of_a_silenced_run(root, run, eventful):
    """The summary and the tags are as ever. After the silence there is an alert for what is new, and nothing else."""
    alerts: list[str] = []
    tracked = SimpleNamespace(summary={}, tags=(), alert=lambda title, text, level: alerts.append(title))

    def not_good(count):
        until(lambda: tracked.summary.get("ckptguard/checkpoints_not_good") == count, "the summary")

    with follow(root, wandb=tracked, settings=QUICK) as follower:
        not_good(1)
        silence_run(run, time.time() + 3600.0, reason="", by="alice")
        poison(root, run, 300)
        not_good(2)
        until(lambda: any(id.step == 300 for id in follower._trackers[0].current_verdicts), "the end of the look")
        assert alerts == []
        end_silence(run)
        poison(root, run, 400)
        not_good(3)
    assert [title.partition("net-")[2] for title in alerts] == ["400.pt is bad"]


def test_mlflow_shows_it(root, eventful, tmp_path, monkeypatch):
    """The metric, and the tags."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'tracked'}")
    with mlflow.start_run() as tracked, follow(root, mlflow=tracked, settings=QUICK):
        pass
    client = mlflow.MlflowClient()
    tags = client.get_run(tracked.info.run_id).data.tags
    assert tags["ckptguard.checkpoints_not_good"] == "1"
    assert tags["ckptguard.known_good"].endswith(os.fspath(Path("run") / "net-100.pt"))
    assert "the loss is NaN" in tags["ckptguard.last_incident"]
    history = client.get_metric_history(tracked.info.run_id, "ckptguard_checkpoint_is_good")
    assert [(point.step, point.value) for point in history] == [(100, 1.0), (200, 0.0)]
