"""How a rank ends: gloo's threads now and then abort a process that ends as usual, after all its work is done."""

from __future__ import annotations

import os
import sys

import torch


def leave() -> None:
    """Wait for the other ranks, then end at once, without the clean-up that aborts. An exception never gets here."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
