"""Runs of real writers, thinned: half of the bytes go, and the framework loads the weights, bit for bit."""

import pytest
import torch
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
    for one in done:
        spared = sizes[one.path] - after[one.path]
        assert spared == one.bytes or (one.anew and spared > one.bytes > 0)
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


def test_lightning_loads_what_stays(copied, written):
    """`load_from_checkpoint` takes each file that was written anew, and a resume is refused in Lightning's words."""
    pytest.importorskip("lightning")
    run = copied("lightning/files")
    rows = thinned(run)
    assert len(rows) >= 2
    assert all(after < before * 0.8 for _, before, after in rows), rows
    launch(
        "write_lightning.py", "weights", *(one for path, *_ in rows for one in (written("lightning/files"), run / path))
    )


def test_dcp_loads_what_stays(copied, written):
    """Of two ranks' folders, also with weights at the top of the state; on two ranks."""
    arguments = []
    for kind in ("step", "titan"):
        run = copied(f"dcp/{kind}")
        rows = thinned(run)
        assert steps_of(rows) == [2, 4]
        for (path, *_), step in zip(rows, steps_of(rows), strict=True):
            arguments += [written(f"dcp/{kind}"), run / path, step]
    launch("write_dcp.py", "weights", *arguments, ranks=2)


@pytest.mark.parametrize("system", ["plain/nested", "megatron/ranks"])
def test_torch_loads_what_stays(system, copied, written):
    """All but the optimizer of a loop's own file, and of each of Megatron's ranks."""
    run = copied(system)
    rows = thinned(run)
    assert len(rows) == 2
    for path, before, after in rows:
        assert after < before * 0.8
        for file in sorted((run / path).rglob("*.pt")) or [run / path]:
            left, whole = (
                torch.load(one, weights_only=False) for one in (file, written(system) / file.relative_to(run))
            )
            assert list(left) == [key for key in whole if key != "optimizer"]
            assert left["model"].keys() == whole["model"].keys()
            assert all(torch.equal(left["model"][name], value) for name, value in whole["model"].items())
