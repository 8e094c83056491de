"""Lightning: exact from an epoch's end, a harmful batch left out, and a last good file that is not deleted."""

from pathlib import Path

import pytest
from contracts.writers.launch import launch
from support.last_saves import recorded_outcome_of_last

from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

pytestmark = [pytest.mark.writers, pytest.mark.timeout(300)]


def train(kind, folder, *strategies):
    """What training itself can see is asserted in processes of its own."""
    launch(str(Path(__file__).with_name("train_lightning.py")), kind, folder)
    for strategy in strategies:
        struck, harmed = folder / strategy / "struck", folder / strategy / "harmed"
        assert len(list_incidents(open_run(str(harmed)))) == 1
        _, second = list_incidents(open_run(str(struck)))
        assert [sample.step for sample in second.details.samples] == [*range(1, 19)]
        for run in (struck, harmed):
            assert recorded_outcome_of_last(run) is Outcome.GOOD
            assert verify_target(str(run), Settings(settle=0.0)).outcome is Outcome.GOOD


def test_one_process(tmp_path):
    """Going back, leaving out, looking before every save, and no deletion of the last good one."""
    train("alone", tmp_path, "alone")


def test_two_ranks(tmp_path):
    """DDP and FSDP2. One rank is struck; both go back to the same epoch, each to its own random numbers."""
    train("ranks", tmp_path, "ddp", "fsdp")
