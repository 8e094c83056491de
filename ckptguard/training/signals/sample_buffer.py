"""A short memory of the last updates, for an incident's report. Adding to it costs well under a microsecond."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from ckptguard.values.incident import Sample, worded

_NEAR = 256  # the last updates one by one
_STRIDE = 16  # of older updates, every 16th
_FAR = 256

Row = tuple[int, float | None, float | None, float | None, float | None]


class UpdateSignals(Protocol):
    """What is known about an update."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def grad_norm(self) -> float | None: ...
    @property
    def scale(self) -> float | None: ...


class SampleBuffer:
    """The last 256 updates, and every 16th of the 4096 before them. All that is put in must be plain numbers."""

    def __init__(self, optimizer: Any = None) -> None:
        self._optimizer = optimizer
        self._near: deque[Row] = deque(maxlen=_NEAR)
        self._far: deque[Row] = deque(maxlen=_FAR)

    def follow(self, optimizer: Any) -> None:
        """Take learning rates from this optimizer from now on."""
        self._optimizer = optimizer

    def append(self, signal: UpdateSignals) -> None:
        """Remember an update, with the learning rate as it is now. What says nothing is not remembered."""
        if signal.loss is not None or signal.grad_norm is not None or signal.scale is not None:
            self.add(signal.step, signal.loss, signal.grad_norm, signal.scale, learning_rate(self._optimizer))

    def add(
        self,
        step: int,
        loss: float | None = None,
        grad_norm: float | None = None,
        scale: float | None = None,
        lr: float | None = None,
    ) -> None:
        """Remember an update."""
        near = self._near
        if len(near) == _NEAR and near[0][0] % _STRIDE == 0:
            self._far.append(near[0])
        near.append((step, loss, grad_norm, scale, lr))

    def restart(self, step: int) -> None:
        """Training is after update `step` again: what came later did not happen."""
        for rows in (self._near, self._far):
            while rows and rows[-1][0] > step:
                rows.pop()

    def samples(self) -> tuple[Sample, ...]:
        """What is remembered, oldest first."""
        rows = (*self._far, *self._near)
        return tuple(Sample(step, *(worded(value) for value in values)) for step, *values in rows)


def learning_rate(optimizer: Any) -> float | None:
    """The learning rate of the first group; None where it is no plain number (reading a tensor would wait)."""
    try:
        rate = optimizer.param_groups[0]["lr"]
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    return rate if isinstance(rate, float) else None
