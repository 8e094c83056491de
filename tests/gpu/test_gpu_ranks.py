"""Ranks on devices: saved behind training, rolled back, resumed, and bit for bit as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

SCRIPT = Path(__file__).with_name("train_ranks_on_device.py")


def launch(folder, kind, backend, device, size):
    """Run all ranks; what each found."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(SCRIPT), str(folder), kind, backend, device.type]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder / "meeting")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        told = [rank.communicate(timeout=280) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, trouble) in zip(ranks, told, strict=True):
        assert rank.returncode == 0, trouble
    return [json.loads(out.rpartition("FOUND")[2]) for out, _ in told]


@pytest.mark.parametrize(
    ("kind", "backend", "size"),
    [
        pytest.param("ddp", "nccl", 1, id="ddp-nccl"),
        pytest.param("ddp", "gloo", 2, id="ddp-gloo-on-one-device"),
        pytest.param("ddp", "nccl", 2, id="ddp-nccl-on-two-devices"),
        pytest.param("fsdp2", "nccl", 2, id="fsdp2-nccl-on-two-devices"),
    ],
)
def test_ranks_save_go_back_and_are_resumed(tmp_path, device, kind, backend, size):
    """DDP on one device over nccl, two ranks that share one over gloo (nccl wants one each), and both on two."""
    if device.type == "cpu":
        backend = "gloo"
    elif backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip("nccl wants a device for each rank")
    for found in launch(tmp_path, kind, backend, device, size):
        [steps, whole], [replayed, back], [first, last] = found["whole"], found["back"], found["parts"]
        assert steps == list(range(1, 10))
        assert replayed == [*range(1, 9), 7, 8, 9]
        assert [first[0], last[0]] == [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
        assert back == last[1] == whole
