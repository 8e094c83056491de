"""One file is one checkpoint: ``epoch_3.pt``, ``last.ckpt``, ``net-500.pth``."""

from __future__ import annotations

from collections.abc import Mapping

from ckptguard.formats.structure import Structure
from ckptguard.layouts.checkpoint import Checkpoint, Gap, Layout


def _gaps(checkpoint: Checkpoint, structures: Mapping[str, Structure]) -> list[Gap]:
    return []


LAYOUT = Layout(name="file", gaps=_gaps, accepts_file=lambda name, around: True)
