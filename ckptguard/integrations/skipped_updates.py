"""Updates of Hugging Face's Trainer that are left out, and what each update's loss says about when harm was done.

The Trainer counts its position in the data by its updates. So the batches of a harmful update are drawn and counted as
ever, but no forward pass, backward pass or optimizer step is made for them. All later batches come at the same steps as
before, also after another resume.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self


class SkippedUpdates:
    """Stands around ``trainer.training_step`` while it is entered. `updates` are numbered from 1, as steps are."""

    def __init__(self, trainer: Any) -> None:
        self.updates: set[int] = set()
        self._trainer = trainer
        self._own = vars(trainer).get("training_step")  # somebody may have wrapped this one Trainer's already
        self._step = trainer.training_step
        self._losses: list[tuple[int, Any]] = []
        self._scale: float | None = None

    def __enter__(self) -> Self:
        self._trainer.training_step = self._training_step
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own is not None:
            self._trainer.training_step = self._own
        else:
            del self._trainer.training_step

    def first_bad_loss(self, *, after: int) -> int | None:
        """The first update after `after` whose loss was not finite on this rank; None if there is none."""
        import torch

        losses = [(update, finite) for update, finite in self._losses if update > after]
        if not losses:
            return None
        finite = torch.stack([flag for _, flag in losses]).tolist()
        return next((update for (update, _), fine in zip(losses, finite, strict=True) if not fine), None)

    def forget(self, *, through: int | None = None) -> None:
        """The losses of updates up to `through` are of no interest any more; None: of all."""
        self._losses = [] if through is None else [(u, f) for u, f in self._losses if u > through]

    def after_update(self, update: int) -> None:
        """Under a loss scaler an update is left out as an overflow is: give it back the scale that this cost."""
        scaler = _scaler(self._trainer)
        if update in self.updates and scaler is not None and self._scale is not None:
            scaler.update(self._scale)
        self._scale = None

    def _training_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        update = self._trainer.state.global_step + 1
        if update not in self.updates:
            loss = self._step(model, inputs, *arguments, **named)
            self._losses.append((update, loss.detach().isfinite().all()))
            return loss
        import torch

        scaler = _scaler(self._trainer)
        if scaler is not None:
            # It insists on a gradient to look at. One that overflows makes it leave the update out by itself.
            self._scale = self._scale if self._scale is not None else float(scaler.get_scale())
            trained = next(p for p in model.parameters() if p.requires_grad and p.numel())
            trained.grad = torch.full_like(trained, float("inf"))
        return torch.zeros((), device=self._trainer.args.device)


def _scaler(trainer: Any) -> Any:
    scaler = getattr(trainer.accelerator, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None
