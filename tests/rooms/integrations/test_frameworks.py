"""The Trainer's kinds, DeepSpeed and Lightning, in processes of their own, where what training can see is asserted."""

import os
from pathlib import Path

import pytest
from contracts.writers.launch import launch
from support.last_saves import recorded_outcome_of_last
from support.views import look

from ckptguard.inspect.status import status
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.values.settings import Settings
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

pytestmark = [pytest.mark.writers, pytest.mark.timeout(400)]


def run(script, *arguments, **how):
    """Run one of the scripts beside this file to its end."""
    launch(str(Path(__file__).with_name(f"{script}.py")), *arguments, **how)


def incidents(run):
    """Those of a run, every checkpoint of which that is left is good."""
    assert verify_target(str(run), Settings(settle=0.0)).outcome is Outcome.GOOD
    return list_incidents(open_run(str(run)))


def test_the_trainer_with_sharded_weights_adapters_and_trl(tmp_path):
    """In one process after the other; the comparison bit for bit is made there."""
    kinds = ("sharded", "lora", "sft")
    run("train_hf", ",".join(kinds), tmp_path)
    assert [len(incidents(tmp_path / kind / "struck")) for kind in kinds] == [1, 1, 1]


@pytest.mark.campaign
def test_two_ranks_of_the_trainer_go_back_together(tmp_path):
    """One rank's weights are struck, or its shard or partition; both go back to the same step, and end as without."""
    kinds = ["ddp", "fsdp", "zero2", "zero3"]
    if os.environ.get("CKPTGUARD_CAMPAIGN") == "full":
        kinds.append("full")
    run("train_hf", ",".join(kinds), tmp_path, ranks=2)
    assert {len(incidents(tmp_path / kind / "struck")) for kind in kinds} == {1}


def test_two_ranks_of_deepspeed(tmp_path):
    """Two gloo ranks, in one process after the other.

    A rollback that replays ends like a run that never failed (ZeRO-2 and ZeRO-3: every rank's fp32 partition, both
    moments, schedule, dropout). The floor of the loss scale is an incident and no crash, the batch is left out and
    training ends. A run that skips every step is seen: DeepSpeed would skip, count and save for ever.
    """
    run("train_deepspeed", tmp_path, ranks=2)
    assert [len(incidents(tmp_path / stage / "struck")) for stage in ("zero2", "zero3")] == [1, 1]
    [floor] = list_incidents(open_run(str(tmp_path / "floor" / "struck")))
    assert floor.cause == "loss_scale"
    assert "already at minimum" in floor.reason
    first, second = list_incidents(open_run(str(tmp_path / "skipping" / "struck")))
    assert first.cause == second.cause == "skipped"


@pytest.mark.parametrize(("kind", "strategies"), [("alone", ["alone"]), ("ranks", ["ddp", "fsdp"])])
def test_lightning(tmp_path, kind, strategies):
    """Exact from an epoch's end; a harmful batch is left out, the last good file is not deleted. Of two ranks under DDP
    and FSDP2 one is struck: both go back to the same epoch, each to its own random numbers."""
    run("train_lightning", kind, tmp_path)
    for strategy in strategies:
        struck, harmed = tmp_path / strategy / "struck", tmp_path / strategy / "harmed"
        assert recorded_outcome_of_last(harmed) is recorded_outcome_of_last(struck) is Outcome.GOOD
        assert all(status(look(str(run))).explanation.startswith("yes: ") for run in (harmed, struck))
        assert len(incidents(harmed)) == 1
        _, second = incidents(struck)
        assert [sample.step for sample in second.details.samples] == [*range(1, 19)]
