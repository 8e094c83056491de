"""DeepSpeed: replay bit for bit, and the two ways in which it takes overflowing gradients, both as incidents."""

from pathlib import Path

import pytest
from contracts.writers.launch import launch

from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

pytestmark = [pytest.mark.writers, pytest.mark.timeout(300)]


def test_two_ranks(tmp_path):
    """Two gloo ranks, in one process after the other; what training itself can see is asserted there.

    A rollback that replays ends like a run that never failed (ZeRO-2 and ZeRO-3: every rank's fp32 partition, both
    moments, schedule, dropout). The floor of the loss scale is an incident and no crash, the batch is left out and
    training ends. A run that skips every step is seen: DeepSpeed would skip, count and save for ever.
    """
    launch(str(Path(__file__).with_name("train_deepspeed.py")), tmp_path, ranks=2)

    def incidents(kind):
        return list_incidents(open_run(str(tmp_path / kind / "struck")))

    for stage in ("zero2", "zero3"):
        assert len(incidents(stage)) == 1
        assert verify_target(str(tmp_path / stage / "struck"), Settings(settle=0.0)).outcome is Outcome.GOOD
    [floor] = incidents("floor")
    assert floor.cause == "loss_scale"
    assert "already at minimum" in floor.reason
    first, second = incidents("skipping")
    assert first.cause == second.cause == "skipped"
