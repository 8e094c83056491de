"""One file is one checkpoint: ``epoch_3.pt``, ``last.ckpt``, ``net-500.pth``."""

from __future__ import annotations

from ckptguard.layouts.checkpoint import Layout

LAYOUT = Layout(name="file", gaps=lambda checkpoint, structures: (), accepts_file=lambda name, around: True)
