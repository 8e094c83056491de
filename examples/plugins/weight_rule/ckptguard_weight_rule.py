"""A rule of one's own: no weight may be larger than 1000, and no tensor may grow tenfold from one save to the next."""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.plugins import Remark, Saved

LARGEST, GROWTH = 1000.0, 10.0


def check(saved: Saved) -> Iterator[Remark]:
    """Yield a remark for each tensor that breaks the rule."""
    before = {tensor.name: tensor.rms for tensor in saved.previous}
    for tensor in saved.tensors:
        if tensor.role != "model" or tensor.rms is None or tensor.largest is None:
            continue
        if tensor.largest > LARGEST:
            message = f"its largest weight is {tensor.largest:.6g}, and the rule allows {LARGEST:g}"
            yield Remark(message, "sickness", tensor.file, tensor.name)
        old = before.get(tensor.name)
        if old and tensor.rms > GROWTH * old:
            message = f"its weights grew from {old:.3g} to {tensor.rms:.3g} (root mean square) since the save before"
            yield Remark(message, "sickness", tensor.file, tensor.name)
