"""Lightning: saves that are verified as they come, a last good one that stays, and a ``fit`` that goes back.

::

    io = ckptguard.integrations.lightning.GuardedIO("runs/exp1")
    trainer = lightning.Trainer(plugins=[io], ...)
    ckptguard.integrations.lightning.fit(trainer, module, loader)

Lightning resumes exactly at the end of an epoch only: within one it begins the epoch's data anew.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from ckptguard.decisions.health import Diagnosis
from ckptguard.decisions.rollback import RollbackPolicy, policy_of
from ckptguard.errors import CkptguardError, NoKnownGoodError, SettingsError, SickTrainingError
from ckptguard.integrations.guarded_run import GuardedRun, ResumeTarget
from ckptguard.integrations.lightning_io import GuardedIO
from ckptguard.runs.settings_file import GivenSettings, given_settings, training_settings
from ckptguard.training.announce import announce_resume
from ckptguard.training.content.tagged_json import decode_state, encode_state, from_text, to_text
from ckptguard.training.content.training_parts import TrainingParts, scale_learning_rate
from ckptguard.training.ranks import Ranks, agree, ranks_of_training, together
from ckptguard.training.signals.curve_recorder import CurveRecorder
from ckptguard.training.signals.device_signals import raise_loss_scale
from ckptguard.training.signals.monitor import TrainingMonitor
from ckptguard.training.state.rng import capture_rng, restore_rng
from ckptguard.values.incident import Details

__all__ = ["GuardCallback", "GuardedIO", "fit"]

_log = logging.getLogger("ckptguard")


class GuardCallback(Callback):
    """Watches losses, weights, buffers, optimizer state and the loss scaler; SickTrainingError, on all ranks, ends
    training instead of the next save. `fit` adds it by itself."""

    def __init__(self, *, policy: RollbackPolicy | None = None, settings: GivenSettings = None) -> None:
        self.target: ResumeTarget | None = None
        self.diagnosis: Diagnosis | None = None
        self.left_out: set[tuple[int, int]] = set()  # (epoch, batch)
        self.lr_factor = 1.0
        self._loaded: dict[str, Any] = {}
        self._batches: dict[int, list[tuple[int, int]]] = {}  # of each update
        self._completed = 0  # updates, before the batch that is at work
        self._begins = False  # from on_fit_start to on_train_start
        allow = given_settings(settings, training_settings).allow_nonfinite
        self._monitor = TrainingMonitor(TrainingParts(model=None), policy_of(policy), allow=allow)
        self._trains = False  # whether there is something to look at
        self.curve: CurveRecorder | None = None
        self.details: Details | None = None  # what was known when it was noticed
        self._ranks: Ranks | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is loaded now."""
        self.diagnosis, self._begins = None, False
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        scheduler = trainer.lr_scheduler_configs[0].scheduler if trainer.lr_scheduler_configs else None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        parts = TrainingParts(
            model=pl_module, optimizer=optimizer, scheduler=scheduler, scaler=scaler, framework="lightning"
        )
        self._monitor.recent.curve = self.curve
        self._monitor.follow(parts, trainer.global_step)
        self._trains = True
        saved = float(self._loaded.get("lr_factor", 1.0))
        if self.target is None:
            self.lr_factor = saved
        scale_learning_rate(optimizer, scheduler, self.lr_factor / saved)
        if self.target is not None and self.target.reset_scale is not None:
            raise_loss_scale(scaler, self.target.reset_scale)
        self._monitor.look(trainer.global_step)
        self._raise_if_sick()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember which update the batch is for."""
        self._completed = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judge the update; Lightning saves after this."""
        here, update = (trainer.current_epoch, batch_idx), self._completed + 1
        for number in range(update, max(update, trainer.global_step) + 1):  # several, with several optimizers
            self._batches.setdefault(number, []).append(here)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if here not in self.left_out:
            self._monitor.observe(update, loss)
        self._monitor.after_step(trainer.global_step)
        self._raise_if_sick()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Look before anything is written; on all ranks. A sharding strategy saves without asking the plugin: what it
        still does beside training is over before that, too."""
        saver = trainer.strategy.checkpoint_io
        if isinstance(saver, GuardedIO):
            saver.wait()
        if self._trains and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._monitor.look(trainer.global_step)  # also while it validates: ModelCheckpoint saves then too
            self._raise_if_sick()
            if self.curve is not None:
                self.curve.saved()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look once more, for the script may save the model now."""
        if self._trains:
            self._monitor.look(trainer.global_step)
            self._raise_if_sick()
        self._monitor.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the model as it was."""
        self._monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """What Lightning leaves out of its checkpoints: every rank's random numbers. And the learning rate's factor."""
        own = to_text(encode_state(capture_rng(), path="rng")).decode()
        return {"rng": self._ranks.gather(own) if self._ranks is not None else [own], "lr_factor": self.lr_factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember it until training begins; a sharding strategy loads after that."""
        self._loaded = dict(state_dict)
        if self._begins:
            self._restore_rng()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the random numbers back, before Lightning makes the iterator of the first epoch: that draws a seed."""
        self._ranks, self._begins = self._ranks or ranks_of_training(), True
        self._restore_rng()

    def _restore_rng(self) -> None:
        assert self._ranks is not None
        saved = self._loaded.pop("rng", ())
        if len(saved) == self._ranks.size:  # other numbers of ranks go on with new ones
            restore_rng(decode_state(from_text(saved[self._ranks.rank].encode())))

    def leave_out(self, first: int, last: int) -> None:
        """The batches of these updates are not trained on any more."""
        for update in range(first, last + 1):
            self.left_out |= set(self._batches.get(update, ()))

    def _raise_if_sick(self) -> None:
        assert self._ranks is not None
        found = agree(self._ranks, self._monitor.sick)
        if found is not None:
            self.diagnosis = found
            self.details = self._monitor.details_of(found)
            self._monitor.close()
            raise SickTrainingError(f"training was stopped at step {found.step}: {found.reason}", known_good=None)


def fit(
    trainer: Any,
    module: Any,
    *data: Any,
    policy: RollbackPolicy | None = None,
    save_every: int = 1,
    daemon: str = "off",
    **arguments: Any,
) -> None:
    """Run ``trainer.fit(module, *data, **arguments)``, and go back to the newest known-good when training turns sick.

    It resumes at the newest known-good, unless a ``ckpt_path`` is given; with None it starts from the beginning. The
    Trainer's plugins must hold a `GuardedIO`. `save_every` is the number of updates between saves, for the policy.
    Batches that did harm are left out: no forward pass and no update is made for them. The last save has its verdict
    when this returns. All ranks call it (DDP, or FSDP2 with sharded checkpoints), and all go back to the same
    checkpoint. Each has its own random numbers again, if there are as many ranks as before.

    RollbackExhausted if the budget is spent. NoKnownGoodError if training turns sick before a good save.
    """
    saver = trainer.strategy.checkpoint_io
    if not isinstance(saver, GuardedIO):
        raise SettingsError("the Trainer does not save by a GuardedIO", hint="Trainer(plugins=[GuardedIO(run)])")
    _start_ranks(trainer, module)
    callback = GuardCallback(policy=policy, settings=saver.settings)
    callback.curve = curve = _curve(saver, trainer)
    trainer.callbacks.insert(0, callback)
    guarded = _guard(saver, policy, daemon, curve)
    newest = guarded.newest() if guarded is not None and "ckpt_path" not in arguments else None
    if newest is not None:
        arguments["ckpt_path"] = newest.path
    elif guarded is None and "ckpt_path" not in arguments and trainer.is_global_zero:
        announce_resume(saver.url, None)
    try:
        with _leaving_out(module, trainer, callback):
            while True:
                try:
                    trainer.fit(module, *data, **arguments)
                    saver.wait()
                    try:
                        guarded = guarded or _guard(saver, policy, daemon, curve)
                    except CkptguardError as error:  # training is over, and well
                        _log.warning("the last save may have no verdict: %s", error.message)
                    if guarded is not None:  # else nothing was saved
                        guarded.judge_last_save()
                    return
                except SickTrainingError:
                    found = callback.diagnosis
                    if found is None:
                        raise
                module.zero_grad()  # torch loads no sharded optimizer state where gradients are left
                saver.wait()
                guarded = guarded or _guard(saver, policy, daemon, curve)
                if guarded is None:
                    raise NoKnownGoodError(f"{found.reason}; nothing that was saved is good")
                callback.target = target = guarded.back(found, save_every=save_every, details=callback.details)
                if target.skip is not None:
                    callback.leave_out(*target.skip)
                callback.lr_factor *= target.lr_factor
                arguments["ckpt_path"] = target.path
    finally:
        saver.wait()
        trainer.callbacks.remove(callback)
        curve.close()
        if guarded is not None:
            guarded.close()


def _start_ranks(trainer: Trainer, module: Any) -> None:
    """Have all ranks started and talking: `fit` asks for a checkpoint to resume from before the first ``trainer.fit``,
    which would do it otherwise. Processes that Lightning starts run the script again, and get here by themselves."""
    if trainer.world_size == 1:
        return
    launcher = trainer.strategy.launcher
    if launcher is not None and launcher.launch(os.getpid) != os.getpid():
        hint = 'strategy="ddp", or torchrun: then every rank calls fit()'
        raise SettingsError("fit() cannot go back in ranks that are spawned for each call", hint=hint)
    trainer.strategy.connect(module)
    trainer.strategy.setup_environment()


def _curve(saver: GuardedIO, trainer: Any) -> CurveRecorder:
    run = None
    if trainer.is_global_zero:
        try:
            run = saver.open_run()
        except CkptguardError as error:
            _log.warning("the loss curve is not recorded: %s", error.message)
    return CurveRecorder(run)


def _guard(saver: GuardedIO, policy: RollbackPolicy | None, daemon: str, curve: CurveRecorder) -> GuardedRun | None:
    """The run, in the series of its checkpoints; None while there is none. Only rank 0 saves, and knows."""
    ranks = ranks_of_training()
    series = together(
        ranks, "looking for known-good checkpoints", lambda: saver.find_series() if ranks.rank == 0 else ""
    )
    if series[0] is None:
        return None
    guarded = GuardedRun(saver.url, series=series[0], settings=saver.settings, policy=policy, daemon=daemon)
    guarded.curve = curve
    return guarded


@contextlib.contextmanager
def _leaving_out(module: Any, trainer: Trainer, callback: GuardCallback) -> Iterator[None]:
    """No update for batches that did harm. With several ranks Lightning allows no ``training_step`` that returns None:
    so a loss that depends on nothing, and no step of the optimizer. It is NaN, because a 0 would look trained."""

    def is_left_out(batch_idx: int) -> bool:
        return (trainer.current_epoch, batch_idx) in callback.left_out

    own = {name: vars(module).get(name) for name in ("training_step", "optimizer_step")}
    training_step, optimizer_step = module.training_step, module.optimizer_step

    # Lightning calls it with as many arguments as the module's own takes.
    @functools.wraps(training_step)
    def step(batch: Any, batch_idx: int, *more: Any, **named: Any) -> Any:
        if not is_left_out(batch_idx):
            return training_step(batch, batch_idx, *more, **named)
        nothing = torch.full((), float("nan"), device=trainer.strategy.root_device, requires_grad=True)
        return nothing if module.automatic_optimization else None

    @functools.wraps(optimizer_step)
    def update(epoch: int, batch_idx: int, optimizer: Any, closure: Any = None, **named: Any) -> None:
        if is_left_out(batch_idx) and closure is not None:
            closure()
        else:
            optimizer_step(epoch, batch_idx, optimizer, closure, **named)

    module.training_step, module.optimizer_step = step, update
    try:
        yield
    finally:
        for name, value in own.items():
            if value is not None:
                setattr(module, name, value)
            else:
                delattr(module, name)
