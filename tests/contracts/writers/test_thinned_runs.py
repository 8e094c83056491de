"""Runs of real writers, thinned: half of the bytes go, and the framework loads the weights, bit for bit."""

import pytest
from launch import launch
from support.runs import QUICK
from support.views import look

from ckptguard.records.run import open_run
from ckptguard.upkeep.reconcile import PassNotes, reconcile
from ckptguard.upkeep.thin import thin
from ckptguard.values.retention_policy import Policy
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.writers, pytest.mark.torch, pytest.mark.timeout(400)]

ONE = QUICK.changed(keep="none", keep_good=1)


def thinned(run):
    """Thin all but the newest: (path, bytes before, bytes after) of each."""
    view = look(open_run(str(run)), ONE)
    reconcile(view, PassNotes())
    sizes = {c.path: c.bytes for c in look(view.run, ONE).checkpoints}
    done, troubles = thin(look(view.run, ONE), Policy(thin_after=1, keep_good=1))
    assert troubles == ()
    assert verify_target(str(run), ONE).outcome is Outcome.GOOD
    after = {c.path: c.bytes for c in look(view.run, ONE).checkpoints}
    assert all(sizes[one.path] - one.bytes == after[one.path] for one in done)
    return [(one.path, sizes[one.path], after[one.path]) for one in done]


def steps_of(rows):
    """The number at the end of each path."""
    return [int(path.rpartition("-")[2].rpartition("_")[2].removeprefix("step")) for path, *_ in rows]


@pytest.mark.parametrize("kinds", [("single", "sharded"), ("ddp",)], ids=["one-process", "ddp"])
def test_transformers_loads_what_stays(kinds, copied, written):
    """`from_pretrained` takes each thinned folder."""
    arguments = []
    for kind in kinds:
        run = copied(f"hf_trainer/{kind}")
        rows = thinned(run)
        assert steps_of(rows) == [2, 4]
        assert all(after < before * 0.7 for _, before, after in rows), rows
        for path, *_ in rows:
            arguments += [written(f"hf_trainer/{kind}"), run / path]
    launch("write_hf_trainer.py", "weights", *arguments)


def test_accelerate_loads_what_stays(copied, written):
    """`load_checkpoint_in_model`, and DCP for FSDP's folder."""
    arguments = []
    for kind in ("named", "fsdp"):
        run = copied(f"accelerate/{kind}")
        rows = thinned(run)
        assert steps_of(rows) == [2, 4]
        for (path, *_), step in zip(rows, steps_of(rows), strict=True):
            arguments += [written(f"accelerate/{kind}"), run / path, step]
    launch("write_accelerate.py", "weights", *arguments)


def test_an_engine_loads_what_stays(copied, written):
    """ZeRO-1 and 2 without their optimizer states; of ZeRO-3 nothing is taken."""
    arguments = []
    for kind in ("zero1", "zero2"):
        run = copied(f"deepspeed/{kind}")
        rows = thinned(run)
        assert steps_of(rows) == [2, 4]
        assert all(after < before * 0.8 for _, before, after in rows), rows
        for step in steps_of(rows):
            arguments += [written(f"deepspeed/{kind}"), run, step]
    launch("write_deepspeed.py", "weights", *arguments, ranks=2)
    assert [before - after for _, before, after in thinned(copied("deepspeed/zero3"))] == [0, 0]
