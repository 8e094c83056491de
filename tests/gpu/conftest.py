"""A CUDA device for every test of this folder; without one all are skipped.

CKPTGUARD_TEST_DEVICE=cpu runs those that say something there too, to try the tests themselves.
"""

from __future__ import annotations

import os

import pytest

DEVICE = os.environ.get("CKPTGUARD_TEST_DEVICE", "cuda")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS begins: else its sums may differ


@pytest.fixture(autouse=True)
def device():
    """Where training computes."""
    torch = pytest.importorskip("torch")
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device(DEVICE)


@pytest.fixture
def cuda(device):
    """The same for what only a CUDA device does."""
    if device.type != "cuda":
        pytest.skip("says nothing without a CUDA device")
    return device


@pytest.fixture
def deterministic(device):
    """Where the same work gives the same bits."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
