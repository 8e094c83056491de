"""How a rank ends: gloo's threads now and then abort a process that ends as usual, after all its work is done."""

from __future__ import annotations

import os
import sys

import torch


def leave() -> None:
    """Wait for the other ranks, then end at once, without the clean-up that aborts. An exception never gets here.

    They meet at the store, for a barrier of theirs breaks where one ends while it still talks. Rank 0, which may hold
    the store, ends last."""
    if torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        store = torch.distributed.distributed_c10d._get_default_store()
        for word in ("done", "gone"):
            store.set(f"{word} {rank}", "")
            if word == "done" or rank == 0:
                store.wait([f"{word} {number}" for number in range(size)])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
