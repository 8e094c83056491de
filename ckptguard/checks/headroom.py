"""Check how near the weights are to the limit of fp16."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from ckptguard.checks.evidence import Evidence
from ckptguard.formats.dtypes import FP16_LIMIT
from ckptguard.values.verdict import Finding, Severity


def check_headroom(evidence: Evidence) -> Iterator[Finding]:
    """Add a notice if the largest weight exceeds half of fp16's range."""
    largest, name, file = largest_weight(evidence)
    if largest > FP16_LIMIT / 2:
        share = f"is {largest / FP16_LIMIT:.0%} of what" if largest <= FP16_LIMIT else "is beyond what"
        message = f"the largest magnitude {largest:.6g} {share} fp16 can hold"
        yield Finding("headroom", Severity.NOTICE, message, file, name)


def largest_weight(evidence: Evidence) -> tuple[float, str | None, str | None]:
    """Return (magnitude, tensor, file) of the largest finite weight; (0.0, None, None) without weights."""
    weights = ((n.largest, t.name, t.file) for t, n in evidence.weights() if n.largest > 0.0)
    return max(weights, key=itemgetter(0), default=(0.0, None, None))
