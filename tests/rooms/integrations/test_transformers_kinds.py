"""``train`` over sharded weights, PEFT, trl, DDP, FSDP2 and DeepSpeed: each replays as if nothing had been."""

import os
from pathlib import Path

import pytest
from contracts.writers.launch import launch

from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

pytestmark = [pytest.mark.writers, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).with_name("train_hf.py")


def check(root, kind):
    """One incident, and every checkpoint that is left is good."""
    run = root / kind / "struck"
    assert len(list_incidents(open_run(str(run)))) == 1
    assert verify_target(str(run), Settings(settle=0.0)).outcome is Outcome.GOOD


def test_sharded_weights_adapters_and_trl(tmp_path):
    """In one process after the other; the comparison bit for bit is made there."""
    kinds = ("sharded", "lora", "sft")
    launch(str(SCRIPT), ",".join(kinds), tmp_path)
    for kind in kinds:
        check(tmp_path, kind)


@pytest.mark.campaign
def test_two_ranks_go_back_together(tmp_path):
    """One rank's weights are struck, or its shard or partition; both go back to the same step, and end as without."""
    kinds = ["ddp", "fsdp", "zero2", "zero3"]
    if os.environ.get("CKPTGUARD_CAMPAIGN") == "full":
        kinds.append("full")
    launch(str(SCRIPT), ",".join(kinds), tmp_path, ranks=2)
    for kind in kinds:
        check(tmp_path, kind)
