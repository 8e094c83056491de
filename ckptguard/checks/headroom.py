"""How near are the weights to what fp16 can hold?"""

from __future__ import annotations

from collections.abc import Iterator

from ckptguard.checks.evidence import Evidence
from ckptguard.formats.dtypes import FP16_LIMIT
from ckptguard.values.verdict import Finding, Severity


def check_headroom(evidence: Evidence) -> Iterator[Finding]:
    """A notice when the largest weight passes half of fp16's range."""
    largest, name, file = largest_weight(evidence)
    if name is None:
        return
    if largest > FP16_LIMIT / 2:
        share = f"is {largest / FP16_LIMIT:.0%} of what" if largest <= FP16_LIMIT else "is beyond what"
        message = f"the largest magnitude {largest:.6g} {share} fp16 can hold"
        yield Finding(check="headroom", severity=Severity.NOTICE, message=message, file=file, tensor=name)


def largest_weight(evidence: Evidence) -> tuple[float, str | None, str | None]:
    """(magnitude, tensor, file) of the largest finite weight; (0.0, None, None) without weights."""
    best: tuple[float, str | None, str | None] = (0.0, None, None)
    for tensor in evidence.tensors():
        if tensor.role == "model" and tensor.numbers is not None and tensor.numbers.largest > best[0]:
            best = (tensor.numbers.largest, tensor.name, tensor.file)
    return best
