"""Exceptions that say, in other people's words, that training is sick. Pure."""

from __future__ import annotations

import re

# Only sentences that can mean nothing else: whatever is not recognised stays the caller's own exception.
_CAUSES = (
    # DeepSpeed's dynamic loss scaler; the update before it was skipped too.
    ("loss_scale", re.compile(r"current loss scale already at minimum", re.IGNORECASE)),
    # torch.nn.utils.clip_grad_norm_(..., error_if_nonfinite=True)
    ("grad_norm", re.compile(r"the total norm of order .{1,40} is non-finite", re.IGNORECASE | re.DOTALL)),
    # torch.autograd.detect_anomaly
    ("grad_norm", re.compile(r"function '\w+' returned nan values in its \d+th output", re.IGNORECASE)),
    # torch.multinomial, met by generation and by sampling losses
    ("weights", re.compile(r"probability tensor contains either `?inf`?, `?nan`? or element < 0", re.IGNORECASE)),
    # torch.distributions: logits of NaN
    ("weights", re.compile(r"but found invalid values:.{0,200}\bnan\b", re.IGNORECASE | re.DOTALL)),
)
_LONGEST = 10_000


def cause_of_error(text: str) -> str | None:
    """Which sickness an exception's text reports; None if it reports none."""
    text = text[:_LONGEST]
    return next((cause for cause, pattern in _CAUSES if pattern.search(text)), None)
