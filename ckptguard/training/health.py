"""From a run's own signals to a diagnosis. Pure: same signals, same answer.

In order of honesty: non-finite weights or gradient norm (act at once); with a loss scaler, several skipped steps in a
row or a scale at its floor (one skipped step is how a scaler works); a NaN loss beside finite gradients and weights,
such as a batch whose labels are all masked (count, act after several in a row). A finite loss and gradient norm do
not prove that the update left finite weights; they do show that the weights going in were.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much is tolerated in a row before training counts as sick."""

    nan_losses: int = 5
    scale_skips: int = 5
    scale_floor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Signal:
    """What is known about one update. `scale` is the loss scale after it (None: no scaler).

    `looked`: weights and buffers were read after it; `bad_tensor` then names the first one that is not finite.
    """

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    scale: float | None = None
    looked: bool = False
    bad_tensor: str | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Healthy (`cause` is None), or sick since `onset_step`: no state after an update before it is under suspicion.

    What may have done the harm are the updates from `onset_step` to `step`.
    """

    step: int
    cause: str | None = None
    onset_step: int | None = None
    reason: str = ""
    evidence: dict[str, object] = field(default_factory=dict)

    @property
    def sick(self) -> bool:
        """Whether training should go back."""
        return self.cause is not None


@dataclass(frozen=True, kw_only=True)
class Health:
    """What is remembered between signals. `healthy_through`: after this update the weights are known to be finite."""

    healthy_through: int = 0
    nan_losses: int = 0
    scale_skips: int = 0
    scale: float | None = None

    def after(self, signal: Signal, limits: Limits) -> tuple[Health, Diagnosis]:
        """Take in one signal."""
        skipped = self._was_skipped(signal)
        nan_loss = signal.loss is not None and not math.isfinite(signal.loss)
        now = dataclasses.replace(
            self,
            healthy_through=self._healthy_through(signal),
            nan_losses=self.nan_losses + 1 if nan_loss else 0 if signal.loss is not None else self.nan_losses,
            scale_skips=self.scale_skips + 1 if skipped else 0 if signal.scale is not None else self.scale_skips,
            scale=signal.scale if signal.scale is not None else self.scale,
        )
        cause, reason = now._judge(signal, limits, skipped=skipped, nan_loss=nan_loss)
        if cause is None:
            return now, Diagnosis(step=signal.step)
        in_a_row = max(now.nan_losses if cause == "nan_loss" else 0, now.scale_skips if cause == "loss_scale" else 0)
        onset = min(now.healthy_through + 1, signal.step)
        if in_a_row:
            onset = signal.step - in_a_row + 1
        evidence: dict[str, object] = {
            k: v
            for k, v in (
                ("loss", signal.loss),
                ("grad_norm", signal.grad_norm),
                ("loss_scale", signal.scale),
                ("tensor", signal.bad_tensor),
                ("in_a_row", in_a_row or None),
                ("healthy_through", now.healthy_through),
            )
            if v is not None
        }
        return now, Diagnosis(step=signal.step, cause=cause, onset_step=onset, reason=reason, evidence=evidence)

    def wants_look(self, signal: Signal) -> bool:
        """Whether the signal cannot be judged without reading the weights."""
        return signal.loss is not None and not math.isfinite(signal.loss) and not signal.looked

    def _was_skipped(self, signal: Signal) -> bool:
        if signal.scale is None:
            return False
        fell = self.scale is not None and signal.scale < self.scale
        return fell or (signal.grad_norm is not None and not math.isfinite(signal.grad_norm))

    def _healthy_through(self, signal: Signal) -> int:
        if signal.looked and signal.bad_tensor is None:
            return max(self.healthy_through, signal.step)
        if signal.loss is not None and math.isfinite(signal.loss) and signal.loss != 0.0:
            # A finite loss was computed from the weights as they were before this update.
            return max(self.healthy_through, signal.step - 1)
        return self.healthy_through

    def _judge(self, signal: Signal, limits: Limits, *, skipped: bool, nan_loss: bool) -> tuple[str | None, str]:
        if signal.bad_tensor is not None:
            return "weights", f"{signal.bad_tensor} is not finite after step {signal.step}"
        if signal.scale is not None:
            if skipped and self.scale_skips >= limits.scale_skips:
                return "loss_scale", f"the loss scaler skipped {self.scale_skips} updates in a row"
            if skipped and signal.scale <= limits.scale_floor:
                return (
                    "loss_scale",
                    f"the loss scale fell to its floor ({signal.scale:g}) and updates are still skipped",
                )
        elif signal.grad_norm is not None and not math.isfinite(signal.grad_norm):
            shown = " (and the loss shows exactly 0)" if signal.loss == 0.0 else ""
            return "grad_norm", f"the gradient norm of step {signal.step} is {signal.grad_norm}{shown}"
        if nan_loss and not skipped and self.nan_losses >= limits.nan_losses:
            return "nan_loss", f"the loss was not finite {self.nan_losses} times in a row"
        return None, ""
