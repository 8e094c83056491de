"""The table of layouts. A new layout is one file and one line here."""

from __future__ import annotations

from ckptguard.layouts import (
    accelerate,
    dcp,
    deepspeed,
    hf_trainer,
    lightning,
    megatron,
    own,
    plain_folder,
    single_file,
    wenet,
)
from ckptguard.layouts import hub_snapshot as hub_cache
from ckptguard.layouts.checkpoint import Layout

# The first row that accepts a folder or file decides, so the more particular come first.
LAYOUTS: dict[str, Layout] = {
    row.name: row
    for row in (
        own.LAYOUT,
        hf_trainer.LAYOUT,
        megatron.LAYOUT,
        lightning.LAYOUT,
        wenet.LAYOUT,
        accelerate.LAYOUT,
        deepspeed.LAYOUT,
        dcp.LAYOUT,
        hub_cache.LAYOUT,
        plain_folder.LAYOUT,
        single_file.LAYOUT,
    )
}
