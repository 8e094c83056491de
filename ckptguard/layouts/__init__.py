"""How files make up a checkpoint. One file a layout, one line in the table."""

from __future__ import annotations

from ckptguard.layouts import hf_trainer, own, plain_folder, single_file
from ckptguard.layouts.checkpoint import Checkpoint, Gap, Layout, step_from_name
from ckptguard.layouts.discovery import enter, find_checkpoints, folder_as_checkpoint

LAYOUTS: dict[str, Layout] = {
    row.name: row for row in (own.LAYOUT, hf_trainer.LAYOUT, plain_folder.LAYOUT, single_file.LAYOUT)
}

__all__ = [
    "LAYOUTS",
    "Checkpoint",
    "Gap",
    "Layout",
    "enter",
    "find_checkpoints",
    "folder_as_checkpoint",
    "step_from_name",
]
