"""Accelerate: a guard that saves by ``save_state``, and a safe ``save_state`` for loops of one's own.

``guard = ckptguard.integrations.accelerate.guard(accelerator, "runs/exp1", model=model, optimizer=optimizer)``, and
then as with any TrainingGuard: ``for step, batch in guard.steps(loader, ...)``.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator

from ckptguard.errors import SettingsError, SickTrainingError
from ckptguard.integrations.guarded_run import GuardedRun
from ckptguard.runs.settings_file import GivenSettings
from ckptguard.training.guard import TrainingGuard
from ckptguard.training.saving.stores import Loaded
from ckptguard.training.signals.weights import first_of, model_tensors, state_tensors
from ckptguard.values.ids import series_of

_AUTOMATIC = "checkpoints/checkpoint_{step}"


def guard(
    accelerator: Accelerator,
    run: str | os.PathLike[str] | None = None,
    *,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    name: str = "checkpoint-{step}",
    **arguments: Any,
) -> TrainingGuard:
    """A TrainingGuard that saves by ``accelerator.save_state`` and loads by ``load_state``, on every rank.

    `model`, `optimizer` and `scheduler` are the prepared ones. `run` defaults to ``accelerator.project_dir``; `name`
    names a checkpoint's folder in it. `arguments` are a TrainingGuard's. A rollback that replays ends like a run that
    was never interrupted, bit for bit if the arithmetic is deterministic. It works under FSDP2, too, sharded or whole.
    """
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise SettingsError(
            "the guard names its checkpoints by their step: leave automatic_checkpoint_naming off",
            hint="a loop with names of its own: ckptguard.integrations.accelerate.GuardedState",
        )

    def save(path: str, step: int) -> None:
        begun = bool(getattr(optimizer, "state", True))
        accelerator.save_state(path)
        if not begun:
            optimizer.state.clear()  # torch makes a step of nothing to have a sharded state to save; Adam counts it

    return TrainingGuard(
        _run_of(accelerator, run),
        model=model,
        optimizer=optimizer,
        scheduler=getattr(scheduler, "scheduler", scheduler),  # the one that holds the rates
        scaler=accelerator.scaler,
        save=save,
        load=accelerator.load_state,
        name=name,
        **arguments,
    )


class GuardedState:
    """``save_state`` and ``load_state`` for a loop of one's own, also with ``automatic_checkpoint_naming``.

    Accelerate's ``total_limit`` deletes old checkpoints before it writes the new one: what is finished is protected
    before that. A model that is not finite is not saved. `load_state` loads the newest known-good, after it was read
    back, and what is newer is set aside: a restart cannot pick it up. All ranks call everything.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run: str | os.PathLike[str] | None = None,
        *,
        model: Any,
        optimizer: Any = None,
        name: str = "checkpoint-{step}",
        settings: GivenSettings = None,
        daemon: str = "auto",
        deadline: float = 120.0,
    ) -> None:
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._automatic = accelerator.project_configuration.automatic_checkpoint_naming
        if self._automatic and run is not None:
            raise SettingsError("with automatic_checkpoint_naming the run is accelerator.project_dir")
        self._name = _AUTOMATIC if self._automatic else name
        if "{step}" not in self._name:
            raise SettingsError(f"the name {name!r} must hold {{step}}, as in checkpoint-{{step}}")
        self._place = _run_of(accelerator, run)
        series = series_of(self._name.format(step=1))
        self._guarded = GuardedRun(self._place, series=series, settings=settings, daemon=daemon, deadline=deadline)

    def save_state(self, step: int | None = None, **arguments: Any) -> str:
        """``accelerator.save_state``; returns where. `step` names the checkpoint, unless Accelerate does.

        SickTrainingError on all ranks instead of saving weights, buffers or optimizer state that are not finite.
        """
        if (step is None) != self._automatic:
            raise SettingsError("say which step this is, unless automatic_checkpoint_naming is on")
        allowed = self._guarded.settings.allow_nonfinite
        name = first_of(model_tensors(self._model) + state_tensors(self._optimizer), allowed)
        if self._guarded.ranks.any(name is not None):
            hint = "load_state() of this guard takes training back"
            what = name or "a tensor of another rank"
            raise SickTrainingError(f"not saved: {what} is not finite", known_good=None, hint=hint)
        self._guarded.protect()
        folder = None if step is None else os.path.join(self._place, self._name.format(step=step))
        written = self._accelerator.save_state(folder, **arguments)
        self._accelerator.wait_for_everyone()
        self._guarded.protect_beside()
        return str(written)

    def load_state(self, **arguments: Any) -> Loaded | None:
        """Load the newest known-good checkpoint. Return its step (with automatic naming, the number of the save) and
        path. None, and nothing is touched, if no checkpoint was ever good."""
        target = self._guarded.newest()
        if target is not None:
            self._accelerator.load_state(target.path, **arguments)
        if self._automatic:
            self._accelerator.project_configuration.iteration = target.step + 1 if target is not None else 0
        return target

    def close(self) -> None:
        """End the daemon that was started here."""
        self._guarded.close()


def _run_of(accelerator: Accelerator, run: str | os.PathLike[str] | None) -> str:
    place = run if run is not None else accelerator.project_dir
    if place is None:
        raise SettingsError("say which run this is: the folder that its checkpoints are saved in")
    return os.fspath(place)
