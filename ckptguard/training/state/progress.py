"""Where training is: updates made, the position in the data, the learning rate's factor; saved and put back."""

from __future__ import annotations

from typing import Any

from ckptguard.errors import StateError
from ckptguard.training.content.training_parts import TrainingParts, scale_learning_rate
from ckptguard.training.signals.scaler import raise_loss_scale
from ckptguard.training.state.check_state_json import wrong_with
from ckptguard.training.state.data_position import DataPosition, Draw
from ckptguard.training.state.resume_gaps import ResumeGaps, gap, saved_for_resume
from ckptguard.training.state.rng import capture_rng, restore_rng

_REMEMBERED_DRAWS = 10_000


class Progress:
    """`step`: updates completed. `now`: the update that the caller is making. `observed`: the last one it told of.
    `gap`: what the last load lacks for going on exactly."""

    def __init__(self, parts: TrainingParts, world_size: int = 1) -> None:
        self._parts, self._world_size = parts, world_size
        self.step = 0
        self.now: int | None = None
        self.observed: int | None = None
        self.lr_factor = 1.0
        self.position: DataPosition | None = None
        self._waiting: dict[str, Any] | None = None  # loaded before the loader was known
        self._draws: dict[int, Draw] = {}
        self.gap = ResumeGaps()

    @property
    def current(self) -> int:
        """The update that is being made, else the last one made."""
        return self.now if self.now is not None else self.step

    @property
    def missing(self) -> tuple[str, ...]:
        """Why training goes on differently than without the interruption."""
        inexact = self.position.inexact if self.position is not None else None
        return self.gap.sentences + ((inexact,) if inexact is not None else ())

    def use_loader(self, loader: Any) -> None:
        """Draw from this loader from now on."""
        if self.position is None or self.position.loader is not loader:
            self.position = DataPosition(loader)

    def begin(self) -> None:
        """Put the data's position back, if it was loaded before the loader was known."""
        if self._waiting is not None and self.position is not None:
            self._put_back(self.position, self._waiting)

    def next_batch(self) -> Any:
        """Draw the next update's batch."""
        assert self.position is not None
        batch, draw = self.position.draw()
        self.now = self.step + 1
        self._draws[self.now] = draw
        if len(self._draws) > _REMEMBERED_DRAWS:
            del self._draws[min(self._draws)]
        return batch

    def made(self) -> int:
        """The update is complete; returns its number."""
        assert self.now is not None
        self.step, self.now = self.now, None
        return self.step

    def leave(self) -> None:
        """The loop ended. An update that was under way counts if it was observed."""
        if self.now is not None and self.observed == self.now:
            self.step = self.now
        self.now = None

    def skip(self, first: int, last: int) -> None:
        """Leave out the draws of some updates from now on."""
        if self.position is not None:
            harmful = (self._draws.get(step) for step in range(first, last + 1))
            self.position.skipped |= {draw for draw in harmful if draw is not None}

    def extra(self) -> dict[str, Any]:
        """What is saved beside model and optimizer."""
        return {
            "rng": capture_rng(),
            "data": self.position.state() if self.position is not None else None,
            "guard": {"lr_factor": self.lr_factor},
            "saved": saved_for_resume(self._parts, self._world_size),
        }

    def arrive(
        self, step: int, extra: dict[str, Any], *, lr_factor: float | None = None, lowest_scale: float | None = None
    ) -> None:
        """Take over what was loaded: rates, data, and the RNG last. `lr_factor`: instead of the one saved;
        `lowest_scale`: a loss scale that was saved collapsed is raised to it. StateError for what no guard saved."""
        why = wrong_with(extra)
        if why is not None:
            raise StateError(f"what was saved beside step {step} cannot be put back: {why}")
        self.step = step
        self._parts.drop_gradients()
        self.gap = gap(self._parts, extra, self._world_size)
        saved_factor = extra.get("guard", {}).get("lr_factor", 1.0)
        self.lr_factor = saved_factor if lr_factor is None else lr_factor
        scale_learning_rate(self._parts.optimizer, self._parts.scheduler, self.lr_factor / saved_factor)
        if lowest_scale is not None:
            raise_loss_scale(self._parts.scaler, lowest_scale)
        self._draws = {n: draw for n, draw in self._draws.items() if n <= step}
        if self.position is None:
            self._waiting = extra
        else:
            self._put_back(self.position, extra)

    def _put_back(self, position: DataPosition, extra: dict[str, Any]) -> None:
        self._waiting = None
        if extra.get("data") is not None:
            position.restore(extra["data"])
        else:
            position.restart_epoch(position.epoch)
        if "rng" in extra:
            restore_rng(extra["rng"])
