"""Going back and coming back on a device: bit for bit the training that never failed."""

import os
import subprocess
import sys

import pytest
import torch
from support.device_training import DeviceTraining, rng_of
from support.guards import guarded
from support.tiny_training import assert_same, train

import ckptguard
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.usefixtures("deterministic")]

PRECISIONS = [None, "bfloat16", "float16"]


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_replay_equals_a_training_that_never_failed(tmp_path, device, precision, blocking):
    """Tensors, losses, schedule, loss scale and the device's generator are as if nothing had happened."""
    hot = (6,) if precision == "float16" else ()
    healthy = DeviceTraining(device, precision, hot=hot)
    train(healthy, tmp_path / "healthy", saving=ckptguard.Saving(blocking=blocking))
    after = rng_of(device)
    failed = DeviceTraining(device, precision, hot=hot)
    back = {10: lambda g: g.rollback("power cut"), 3: lambda g: g.rollback()}
    steps = train(failed, tmp_path / "failed", at=back, saving=ckptguard.Saving(blocking=blocking))
    assert steps == [1, 2, 3, *range(1, 11), *range(9, 18)]
    assert_same(healthy, failed)
    assert (failed.scales, failed.scaler.state_dict()) == (healthy.scales, healthy.scaler.state_dict())
    assert rng_of(device) == after
    if hot:
        assert healthy.scales[6] == healthy.scales[5] / 2, "nothing overflowed: the scaler was not tried"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resume_in_a_fresh_process_continues_bit_for_bit(tmp_path, device, precision):
    """One process is killed between two saves, another one goes on."""
    script = (
        "import os, sys, torch\n"
        "torch.use_deterministic_algorithms(True)\n"
        "from support.device_training import DeviceTraining\n"
        "from support.tiny_training import train\n"
        f"training = DeviceTraining(torch.device({device.type!r}), {precision!r}, seed=int(sys.argv[1]))\n"
        f"train(training, {str(tmp_path / 'run')!r}, at={{int(sys.argv[2]): lambda g: os._exit(9)}})\n"
        "cpu = {n: t.cpu() for n, t in training.tensors().items()}\n"
        f"torch.save((cpu, training.losses, training.scales), {str(tmp_path / 'end.pt')!r})\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for seed, kill, code in ((7, 11, 9), (3, 99, 0)):
        command = [sys.executable, "-c", script, str(seed), str(kill)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == code, done.stderr
    whole = DeviceTraining(device, precision)
    train(whole, tmp_path / "whole")
    tensors, losses, scales = torch.load(tmp_path / "end.pt")
    assert [n for n, tensor in whole.tensors().items() if not torch.equal(tensor.cpu(), tensors[n])] == []
    assert losses == {step: loss for step, loss in whole.losses.items() if step > 8}
    assert scales == {step: scale for step, scale in whole.scales.items() if step > 8}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_poisoned_weight_takes_training_back(tmp_path, device, precision):
    """NaN on the device is found without being asked for, and training ends finite."""
    training, seen = DeviceTraining(device, precision), []
    with guarded(
        tmp_path / "run", training.model, training.optimizer, policy=ckptguard.RollbackPolicy(check_every=1)
    ) as guard:
        for step, batch in guard.steps(training.loader, total=12, save_every=4):
            seen.append(step)
            loss, norm = training.update(step, batch)
            if len(seen) == 6:
                with torch.no_grad():
                    training.model[0].weight[1, 1] = torch.nan
            guard.observe(loss=loss, grad_norm=norm)
    assert 5 in seen[6:]
    assert seen[-1] == 12
    assert all(bool(p.isfinite().all()) for p in training.model.parameters())
    assert [i.cause for i in list_incidents(open_run(str(tmp_path / "run")))] == ["weights"]
