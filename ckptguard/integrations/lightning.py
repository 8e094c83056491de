"""Lightning: saves that are verified as they come, a last good one that stays, and a ``fit`` that goes back.

::

    io = ckptguard.integrations.lightning.GuardedIO("runs/exp1")
    trainer = lightning.Trainer(plugins=[io], ...)
    ckptguard.integrations.lightning.fit(trainer, module, loader)

Lightning resumes exactly at the end of an epoch only: within one it begins the epoch's data anew.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from ckptguard.decisions.health import Diagnosis
from ckptguard.decisions.rollback_policy import RateCut, RollbackDecision, RollbackPolicy, policy_of
from ckptguard.errors import NoKnownGoodError, SettingsError, SickTrainingError
from ckptguard.integrations.guarded_run import GuardedRun, instead
from ckptguard.integrations.lightning_io import GuardedIO
from ckptguard.runs.settings_file import GivenSettings, given_settings, training_settings
from ckptguard.training.content.tagged_json import decode_state, encode_state, from_text, to_text
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.ranks import Ranks, agree, ranks_of_training
from ckptguard.training.rollback import rollbacks as going_back
from ckptguard.training.rollback.rollbacks import Rollback
from ckptguard.training.signals.monitor import TrainingMonitor
from ckptguard.training.state.progress import adjust, as_saved, cut_after, cut_of
from ckptguard.training.state.rng import capture_rng, restore_rng
from ckptguard.values.incident import Details

__all__ = ["GuardCallback", "GuardedIO", "fit"]


class GuardCallback(Callback):
    """Watches losses, weights, buffers, optimizer state and the loss scaler; SickTrainingError, on all ranks, ends
    training instead of the next save. `fit` adds it by itself."""

    def __init__(self, *, policy: RollbackPolicy | None = None, settings: GivenSettings = None) -> None:
        self.diagnosis: Diagnosis | None = None
        self.left_out: set[tuple[int, int]] = set()  # (epoch, batch)
        self.cut = RateCut()
        self._decided: RollbackDecision | None = None  # about the last rollback
        self._loaded: dict[str, Any] = {}
        self._batches: dict[int, list[tuple[int, int]]] = {}  # of each update
        self._completed = 0  # updates, before the batch that is at work
        self._begins = False  # from on_fit_start to on_train_start
        allow = given_settings(settings, training_settings).allow_nonfinite
        self._policy, self._parts = policy_of(policy), TrainingParts(model=None)
        self._monitor = TrainingMonitor(self._parts, self._policy, allow=allow)
        self._trains = False  # whether there is something to look at
        self.details = Details()  # what was known when it was noticed
        self._ranks: Ranks | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is loaded now."""
        self.diagnosis, self._begins = None, False
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        scheduler = trainer.lr_scheduler_configs[0].scheduler if trainer.lr_scheduler_configs else None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._parts = TrainingParts(pl_module, optimizer, scheduler, scaler, framework="lightning")
        self._monitor.follow(self._parts, trainer.global_step)
        self._trains = True
        saved = cut_of(self._loaded, trainer.global_step)
        self._loaded = {}  # another training with this callback may load nothing
        lowest_scale = self._decided.reset_scale if self._decided is not None else None
        cut = saved if self._decided is None else self.cut
        self.cut = adjust(self._parts, cut, saved=saved, lowest_scale=lowest_scale)
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
        self.cut = cut_after(self._parts, self.cut, self._policy, trainer.global_step)
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
            self._monitor.recent.curve.saved()

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
        return {"rng": self._ranks.gather(own) if self._ranks is not None else [own], **as_saved(self.cut)}

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
    _save_into_the_run(trainer, saver)
    guarded = GuardedRun(saver.url, series=saver.find_series, settings=saver.settings, policy=policy, daemon=daemon)
    fits = _Fits(trainer, module, saver, guarded, save_every)
    trainer.callbacks.insert(0, fits)
    try:
        if "ckpt_path" not in arguments and (newest := guarded.newest()) is not None:
            arguments["ckpt_path"] = newest.path
        fits.fit = functools.partial(trainer.fit, module, *data, **arguments)
        with instead(module, training_step=fits.training_step(), optimizer_step=fits.optimizer_step()):
            for _ in going_back.train(fits):
                pass
        guarded.judge_last_save()
        if guarded.leads:  # a sharding strategy saves without asking the plugin
            saver.keep()
    finally:
        saver.wait()
        trainer.callbacks.remove(fits)
        guarded.close()


def _save_into_the_run(trainer: Trainer, saver: GuardedIO) -> None:
    """Where the Trainer's default folder for checkpoints is not in the run, those without another one go to the run."""
    default = (trainer.logger.save_dir if trainer.logger is not None else None) or trainer.default_root_dir
    if "://" not in str(default) and not saver.holds(os.path.realpath(default)):
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = saver.url


class _Fits(GuardCallback):
    """One ``trainer.fit`` after the other: the callback for them, and the `Training` that they are together."""

    fit: Callable[..., object]

    def __init__(
        self, trainer: Trainer, module: LightningModule, saver: GuardedIO, guarded: GuardedRun, save_every: int
    ) -> None:
        super().__init__(policy=guarded.policy, settings=guarded.settings)
        self._trainer, self._module, self._saver = trainer, module, saver
        self._guarded, self._save_every = guarded, save_every
        self._ranks = guarded.ranks
        self._monitor.recent.curve = guarded.curve

    @property
    def state_key(self) -> str:
        """Its state is that of a `GuardCallback`, in checkpoints of any version."""
        return GuardCallback.__qualname__

    def stretch(self) -> Generator[None, None, Diagnosis | None]:
        """One ``trainer.fit``."""
        yield from ()  # the Trainer makes the updates
        try:
            self.fit()
            return None
        except SickTrainingError:
            if self.diagnosis is None:
                raise
            self._module.zero_grad()  # torch loads no sharded optimizer state where gradients are left
            return self.diagnosis
        finally:
            self._saver.wait()

    def go_back(self, sick: Diagnosis) -> Rollback:
        """Choose the next start."""
        if self._guarded.on_first("looking for known-good checkpoints", self._saver.find_series) is None:
            raise NoKnownGoodError(f"{sick.reason}; nothing that was saved is good")
        return self._guarded.go_back(sick, save_every=self._save_every, details=self.details)

    def leave_out(self, first: int, last: int) -> None:
        """The batches of these updates are not trained on any more."""
        for update in range(first, last + 1):
            self.left_out |= set(self._batches.get(update, ()))
        self._guarded.curve.skip(first, last)

    def arrive(self, went: Rollback) -> None:
        """Have the next ``trainer.fit`` begin there."""
        self._decided = went.decision
        self.cut = self.cut.after(went.decision, last=went.last)
        self.fit = functools.partial(self.fit, ckpt_path=went.loaded.path)

    def training_step(self) -> Callable[..., Any]:
        """The module's, but not for batches that did harm. With several ranks Lightning allows no ``training_step``
        that returns None: so a loss that depends on nothing. It is NaN, because a 0 would look trained."""
        own = self._module.training_step

        # Lightning calls it with as many arguments as the module's own takes.
        @functools.wraps(own)
        def step(batch: Any, batch_idx: int, *more: Any, **named: Any) -> Any:
            if not self._is_left_out(batch_idx):
                return own(batch, batch_idx, *more, **named)
            nothing = torch.full((), float("nan"), device=self._trainer.strategy.root_device, requires_grad=True)
            return nothing if self._module.automatic_optimization else None

        return step

    def optimizer_step(self) -> Callable[..., None]:
        """The module's, but no step of the optimizer for batches that did harm."""
        own = self._module.optimizer_step

        @functools.wraps(own)
        def update(epoch: int, batch_idx: int, optimizer: Any, closure: Any = None, **named: Any) -> None:
            if self._is_left_out(batch_idx) and closure is not None:
                closure()
            else:
                own(epoch, batch_idx, optimizer, closure, **named)

        return update

    def _is_left_out(self, batch_idx: int) -> bool:
        return (self._trainer.current_epoch, batch_idx) in self.left_out


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
