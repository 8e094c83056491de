"""One file is one checkpoint: ``epoch_3.pt``, ``last.ckpt``, ``net-500.pth``. So are the files of the ranks of a save:
``model_0000099.rank_0.pth``."""

from __future__ import annotations

from ckptguard.decisions.names import read_names
from ckptguard.layouts.checkpoint import Checkpoint, Gap, Layout, Structures


def _gaps(checkpoint: Checkpoint, structures: Structures) -> list[Gap]:
    """Report the parts of a save that their names count and that are missing: ``step_5-00001-of-00004.pt``."""
    if checkpoint.step is None:  # a shard alone, which somebody asked for
        return []
    named = [one for one in read_names(checkpoint.files).values() if one.part is not None]
    total = max((one.parts for one in named if one.parts is not None), default=0)
    there = sorted({one.part for one in named if one.part is not None})
    return [Gap(f"only {len(there)} of {total} parts are there: {there[:20]}")] if len(there) < total else []


LAYOUT = Layout(name="file", gaps=_gaps, accepts_file=lambda name, around: True)
