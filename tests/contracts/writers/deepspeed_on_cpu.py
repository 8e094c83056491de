"""DeepSpeed without an accelerator and without a compiler."""

from __future__ import annotations

import importlib
import os

import torch


def prepare() -> None:
    """Leave out the shared-memory reduction that DeepSpeed would compile first: gloo does the same, more slowly."""
    # by its module name: `deepspeed.comm.torch` as an attribute is torch itself
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def prepare_accelerate() -> None:
    """Tell accelerate of the gloo ranks: on a CPU it would take each of them for the only one."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def gloo(self, cpu, sagemaker=False, backend=None):
        return "gloo", DistributedType.DEEPSPEED

    def cpu(self):
        self.device = torch.device("cpu")

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState._prepare_backend = gloo
    PartialState.set_device = cpu
