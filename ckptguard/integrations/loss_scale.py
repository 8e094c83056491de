"""DeepSpeed ends a run whose fp16 loss scale cannot fall any further with a bare Exception: told from all others."""

from __future__ import annotations

from ckptguard.training.health import Diagnosis

_WORDS = "Current loss scale already at minimum"


def floor_reached(error: BaseException, *, step: int, skips: int = 1) -> Diagnosis | None:
    """The sickness that the exception tells of; None if it is any other one. `skips`: the updates up to `step` that
    were skipped for it in a row."""
    if _WORDS not in str(error):
        return None
    return Diagnosis(
        step=step,
        cause="loss_scale",
        onset_step=max(step - skips + 1, 1),
        reason=f"the loss scale is at its floor at step {step} and the gradients still overflow",
        evidence={"error": str(error)[:200], "in_a_row": skips},
    )
