"""DeepSpeed: replay bit for bit, and the two ways in which it takes overflowing gradients, both as incidents."""

from pathlib import Path

import pytest
from contracts.writers.launch import launch

from ckptguard.config import Settings
from ckptguard.operations.verify_target import verify_target
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.verdict import Outcome

pytestmark = [pytest.mark.writers, pytest.mark.timeout(300)]


def train(kind, folder):
    """Two gloo ranks; returns the incidents of the run."""
    launch(str(Path(__file__).with_name("train_deepspeed.py")), kind, folder, ranks=2)
    return list_incidents(open_run(str(folder / "struck")))


def test_a_rollback_that_replays_ends_like_a_run_that_never_failed(tmp_path):
    """ZeRO-2: every rank's fp32 partition, both moments, schedule, dropout."""
    assert len(train("replay", tmp_path)) == 1
    assert verify_target(str(tmp_path / "struck"), Settings(settle=0.0)).outcome is Outcome.GOOD


def test_the_floor_of_the_loss_scale_is_an_incident_and_no_crash(tmp_path):
    """DeepSpeed's bare exception; the batch is left out and training ends."""
    [incident] = train("floor", tmp_path)
    assert incident.cause == "loss_scale"
    assert "already at minimum" in incident.reason


def test_a_run_that_skips_every_step_is_seen(tmp_path):
    """bf16: DeepSpeed would skip, count and save for ever."""
    first, second = train("skipping", tmp_path)
    assert first.cause == second.cause == "skipped"
