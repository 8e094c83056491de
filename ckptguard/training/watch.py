"""What a guard sees of training: signals and looks at the tensors, remembered as a state of health."""

from __future__ import annotations

import dataclasses
from typing import Any

from ckptguard.config import Settings
from ckptguard.training.health import Diagnosis, Health, Limits, Signal
from ckptguard.training.parts import Parts
from ckptguard.training.policy import RollbackPolicy
from ckptguard.training.weights import first_non_finite, first_non_finite_state


class Watch:
    """Takes in what is known about each update. `sick` is the first sickness since `restart`, or None."""

    def __init__(self, parts: Parts, settings: Settings, policy: RollbackPolicy, *, check_every: int) -> None:
        self._parts, self._settings = parts, settings
        self._limits = Limits(nan_losses=policy.nan_losses, scale_skips=policy.scale_skips)
        self._check_every = check_every
        self._last_look = 0
        self._health = Health()
        self.sick: Diagnosis | None = None

    def observe(self, step: int, loss: Any, grad_norm: Any) -> Diagnosis:
        """Take in the signals of an update; the tensors are read if it cannot be judged without."""
        signal = Signal(step=step, loss=_number(loss), grad_norm=_number(grad_norm), scale=self._loss_scale())
        if self._health.wants_look(signal):
            signal = dataclasses.replace(signal, looked=True, bad_tensor=self._bad_tensor())
        return self._take_in(signal)

    def look(self, step: int) -> Diagnosis:
        """Read weights, buffers and optimizer state as they are after an update."""
        self._last_look = step
        return self._take_in(Signal(step=step, looked=True, bad_tensor=self._bad_tensor()))

    def look_is_due(self, step: int) -> bool:
        """Whether the last look is `check_every` updates ago."""
        return step - self._last_look >= self._check_every

    def restart(self, step: int) -> None:
        """Forget everything: a state that was verified good was loaded, that after update `step`."""
        self._last_look = step
        self._health = Health(healthy_through=step)
        self.sick = None

    def _take_in(self, signal: Signal) -> Diagnosis:
        self._health, diagnosis = self._health.after(signal, self._limits)
        if diagnosis.sick and self.sick is None:
            self.sick = diagnosis
        return diagnosis

    def _bad_tensor(self) -> str | None:
        allowed = self._settings.allow_nonfinite
        return first_non_finite(self._parts.model, allowed) or first_non_finite_state(self._parts.optimizer, allowed)

    def _loss_scale(self) -> float | None:
        scaler = self._parts.scaler
        if scaler is None or not getattr(scaler, "is_enabled", lambda: True)():
            return None
        return float(scaler.get_scale())


def _number(value: Any) -> float | None:
    """A float of what the caller gives; one that lies on a device is fetched."""
    if value is None:
        return None
    return float(value.detach() if hasattr(value, "detach") else value)
