"""DeepSpeed: a guard around an engine. A loss scale at its floor is an incident, and so is a run that skips every step.

::

    guard = ckptguard.integrations.deepspeed.EngineGuard(engine, "runs/exp1")
    for step, batch in guard.steps(loader, total=10_000, save_every=500):
        guard.update(engine(batch).loss)

DeepSpeed skips steps whose gradients are not finite, counts them as steps all the same, and goes on saving. In fp16 it
ends the run with a bare exception when the loss scale cannot fall any further. In bf16 and fp32 it never ends it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckptguard.decisions.health import Diagnosis
from ckptguard.errors import StateError
from ckptguard.training.guard import TrainingGuard


class EngineGuard(TrainingGuard):
    """A TrainingGuard whose checkpoints are DeepSpeed's tags ``global_stepN``, saved and loaded by the engine on all
    ranks.

    One batch of the loader is one ``update``: with gradient accumulation, give it as many micro-batches in one.
    `arguments` are a TrainingGuard's. After a rollback the learning rates of DeepSpeed's own schedules are lowered as
    far as those keep them in lists.
    """

    framework = "deepspeed"

    def __init__(self, engine: Any, run: str | os.PathLike[str], **arguments: Any) -> None:
        self._engine = engine
        self._skipped = int(engine.skipped_steps)
        super().__init__(
            run,
            model=engine.module,
            optimizer=_torch_optimizer(engine.optimizer),
            scheduler=engine.lr_scheduler,
            scaler=EngineScaler(engine) if engine.fp16_enabled() else None,
            save=self._save_tag,
            load=self._load_tag,
            name="global_step{step}",
            **arguments,
        )

    def update(self, loss: Any) -> Diagnosis:
        """``engine.backward(loss)`` and ``engine.step()``, observed. What they raise is raised, unless it says that
        training is sick, such as "Current loss scale already at minimum": then `steps` goes back."""
        engine = self._engine
        before = int(engine.skipped_steps)
        try:
            engine.backward(loss)
            engine.step()
        except Exception as error:
            found = self.observe(loss, skipped=True, error=error)
            if not found.sick:
                raise
            engine.zero_grad()
            return found
        skipped = int(engine.skipped_steps) > before
        return self.observe(loss, None if skipped else engine.get_global_grad_norm(), skipped=skipped)

    def _save_tag(self, path: str, step: int) -> None:
        folder, tag = os.path.split(path)
        self._engine.save_checkpoint(folder, tag=tag)

    def _load_tag(self, path: str) -> None:
        folder, tag = os.path.split(path)
        try:
            loaded, _ = self._engine.load_checkpoint(folder, tag=tag)
        except Exception as error:
            if "world size" not in str(error):
                raise
            hint = "start as many processes as saved it, or convert it to a universal checkpoint"
            raise StateError(f"{path} was saved by another number of processes: {error}", hint=hint) from error
        if loaded is None:
            raise StateError(f"DeepSpeed did not load {path}")


class EngineScaler:
    """The loss scale of an engine in fp16, as a GradScaler shows its own."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def is_enabled(self) -> bool:
        """Always: it is made for fp16 only."""
        return True

    def get_scale(self) -> float:
        """The scale now."""
        return float(self._engine.optimizer.loss_scaler.cur_scale)

    def state_dict(self) -> dict[str, Any]:
        """The scale; DeepSpeed saves the rest of its scaler."""
        return {"scale": self.get_scale()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the scale."""
        self._engine.optimizer.loss_scaler.cur_scale = state["scale"]


def _torch_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside, whose state can be looked at, and whose groups hold the rates."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if inner is not None and hasattr(inner, "param_groups") else optimizer
