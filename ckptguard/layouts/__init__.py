"""How files form a checkpoint. One file per layout, one line in the table."""

from __future__ import annotations

from ckptguard.layouts.checkpoint import Checkpoint, Gap, Layout, tops
from ckptguard.layouts.discovery import enter, find_checkpoints, folder_as_checkpoint
from ckptguard.layouts.step_names import step_from_name
from ckptguard.layouts.table import LAYOUTS

__all__ = [
    "LAYOUTS",
    "Checkpoint",
    "Gap",
    "Layout",
    "enter",
    "find_checkpoints",
    "folder_as_checkpoint",
    "step_from_name",
    "tops",
]
