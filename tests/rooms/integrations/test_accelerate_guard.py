"""Accelerate: replay bit for bit, and a known-good that outlives ``total_limit``."""

import inspect
import shutil
from pathlib import Path

import pytest
from contracts.writers.launch import launch
from support.runs import QUICK

import ckptguard.integrations
from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.errors import SettingsError, SickTrainingError
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")

from support.tiny_trainer import same  # noqa: E402
from train_accelerate import TOTAL, Parts, alone, guarded  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def test_a_rollback_that_replays_ends_like_a_loop_without_a_guard(tmp_path):
    """Dropout, batch statistics, warm-up, shuffling, an epoch's end."""
    untouched = alone()
    struck, made = guarded(str(tmp_path), 10, RollbackPolicy(skip=False))
    assert made == [*range(1, 12), *range(9, TOTAL + 1)]
    assert same(struck.everything(), untouched.everything())
    assert len(list_incidents(open_run(str(tmp_path)))) == 1
    assert verify_target(str(tmp_path), QUICK).outcome is Outcome.GOOD


HAS_FSDP2 = "fsdp_version" in inspect.signature(accelerate.FullyShardedDataParallelPlugin).parameters
needs_fsdp2 = pytest.mark.skipif(not HAS_FSDP2, reason="Accelerate has FSDP2 since 1.6")


@pytest.mark.writers
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=needs_fsdp2)])
def test_two_ranks(kind, tmp_path):
    """One of them is struck; both go back, each to its own place in the data and its own random numbers."""
    launch(str(Path(__file__).with_name("train_accelerate.py")), kind, tmp_path / "run", ranks=2)
    assert len(list_incidents(open_run(str(tmp_path / "run")))) == 1
    assert verify_target(str(tmp_path / "run"), QUICK).outcome is Outcome.GOOD


def counted(folder, **arguments):
    """A loop's parts whose saves Accelerate counts, of which it leaves one."""
    parts = Parts()
    parts.accelerator.project_configuration = accelerate.utils.ProjectConfiguration(
        str(folder), automatic_checkpoint_naming=True, total_limit=1
    )
    state = ckptguard.integrations.accelerate.GuardedState(
        parts.accelerator, model=parts.model, optimizer=parts.optimizer, settings=QUICK, daemon="off", **arguments
    )
    return parts, state


def test_the_known_good_outlives_total_limit(tmp_path):
    """total_limit=1: the save before is deleted first, and the new one is then cut short as a full disk leaves it."""
    parts, state = counted(tmp_path)
    batches = list(parts.loader)
    parts.update(batches[0])
    assert state.save_state() == str(tmp_path / "checkpoints" / "checkpoint_0")
    good = {k: v.clone() for k, v in parts.net.state_dict().items()}
    parts.update(batches[1])
    state.save_state()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1"]
    weights = tmp_path / "checkpoints" / "checkpoint_1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    parts.update(batches[2])
    target = state.load_state()
    assert target is not None
    assert (target.step, target.path) == (0, str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert same(dict(parts.net.state_dict()), good)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0"]
    assert state.save_state() == str(tmp_path / "checkpoints" / "checkpoint_1")


def test_what_is_not_finite_is_not_saved(tmp_path):
    """And nothing is deleted for it."""
    parts, state = counted(tmp_path)
    state.save_state()
    with torch.no_grad():
        parts.net[1].running_mean.add_(1e38).mul_(1e38)
    with pytest.raises(SickTrainingError, match="running_mean"):
        state.save_state()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0"]


def test_nothing_to_load(tmp_path):
    """A new run: nothing is touched."""
    _, state = counted(tmp_path)
    assert state.load_state() is None


def test_names_of_ones_own(tmp_path):
    """The loop says the step."""
    parts = Parts()
    state = ckptguard.integrations.accelerate.GuardedState(
        parts.accelerator, tmp_path, model=parts.model, settings=QUICK, daemon="off", name="step_{step}"
    )
    state.save_state(4)
    state.save_state(8)
    shutil.rmtree(tmp_path / "step_8")
    target = state.load_state()
    assert target is not None
    assert target.step in (4, 8)
    assert Path(target.path).is_dir()
    with pytest.raises(SettingsError):
        state.save_state()


def test_automatic_names_are_no_steps(tmp_path):
    """The guard counts updates, Accelerate saves."""
    parts, _ = counted(tmp_path)
    with pytest.raises(SettingsError, match="automatic_checkpoint_naming"):
        ckptguard.integrations.accelerate.guard(parts.accelerator, tmp_path, model=parts.model)
