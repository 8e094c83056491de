"""Lightning: saves that are verified as they come, a last good one that stays, and a ``fit`` that goes back.

::

    io = ckptguard.integrations.lightning.GuardedIO("runs/exp1")
    trainer = lightning.Trainer(plugins=[io], ...)
    ckptguard.integrations.lightning.fit(trainer, module, loader)

Lightning resumes exactly at the end of an epoch only: within one it begins the epoch's data anew.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer

from ckptguard.config import Settings
from ckptguard.errors import CkptguardError, NoKnownGoodError, SettingsError, SickTrainingError
from ckptguard.incident import Details
from ckptguard.integrations.guarded_run import GuardedRun, Target
from ckptguard.operations.find_known_good import find_known_good
from ckptguard.operations.listing import find_checkpoint
from ckptguard.operations.load_settings import load_settings
from ckptguard.operations.verify import verify_checkpoint
from ckptguard.records.run import Run, open_run
from ckptguard.training.evidence import Evidence
from ckptguard.training.health import Diagnosis
from ckptguard.training.parts import Parts, scale_learning_rate
from ckptguard.training.policy import RollbackPolicy
from ckptguard.training.ranks import Ranks, agree, ranks_of_training
from ckptguard.training.rng import capture_rng, restore_rng
from ckptguard.training.scaler import raise_loss_scale
from ckptguard.training.state_json import decode_state, encode_state, from_text, to_text
from ckptguard.training.watch import Watch
from ckptguard.verdict import Outcome

_log = logging.getLogger("ckptguard")


class GuardedIO(TorchCheckpointIO):
    """Lightning's own way of saving, and each file below `run` is read back and sealed before training goes on.

    What ``ModelCheckpoint`` wants deleted is deleted, unless it is the last good one: that goes when there is another.
    Trouble of ours is a warning; what Lightning raises while saving is raised.
    """

    def __init__(self, run: str | os.PathLike[str], *, settings: Settings | None = None) -> None:
        self.settings = settings if settings is not None else load_settings(None, os.environ)
        self.url = os.path.abspath(os.fspath(run))
        self.series: str | None = None  # of the last save that has a step
        self._spared: set[str] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save, verify, and delete what was spared before, if this one is good."""
        super().save_checkpoint(checkpoint, path, storage_options)
        try:
            if self._verify(os.path.abspath(os.fspath(path))):
                for spared in sorted(self._spared):
                    self.remove_checkpoint(spared)
        except (CkptguardError, OSError) as error:
            _log.warning("%s was saved, and could not be verified: %s", path, error)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete, unless it is the known-good."""
        place = os.path.abspath(os.fspath(path))
        try:
            known = find_known_good(self.open_run()).path
        except NoKnownGoodError:
            known = None
        except CkptguardError as error:
            _log.warning("%s is not deleted, for it may be the last good one: %s", path, error)
            known = place
        if known == place:
            self._spared.add(place)
            return
        self._spared.discard(place)
        super().remove_checkpoint(path)

    def _verify(self, place: str) -> bool:
        if os.path.commonpath([place, self.url]) != self.url:
            _log.warning("%s is not in the run %s: it is not guarded", place, self.url)
            return False
        run = self.open_run()
        checkpoint = find_checkpoint(run, os.path.relpath(place, self.url))
        if checkpoint is None:
            return False
        if checkpoint.step is not None:
            self.series = checkpoint.series
        checked = verify_checkpoint(run, checkpoint, self.settings)
        if checked.outcome is not Outcome.GOOD:
            _log.error("%s is %s", place, checked.outcome.value)
        return checked.outcome is Outcome.GOOD and checkpoint.step is not None

    def open_run(self) -> Run:
        """The run as it is now."""
        return open_run(self.url, records=self.settings.records, patterns=self.settings.patterns, must_exist=False)


class GuardCallback(Callback):
    """Watches losses, weights, buffers, optimizer state and the loss scaler; SickTrainingError, on all ranks, ends
    training instead of the next save. `fit` adds it by itself."""

    def __init__(
        self, *, check_every: int = 50, policy: RollbackPolicy | None = None, settings: Settings | None = None
    ) -> None:
        self.target: Target | None = None
        self.diagnosis: Diagnosis | None = None
        self.left_out: set[tuple[int, int]] = set()  # (epoch, batch)
        self.lr_factor = 1.0
        self._loaded: dict[str, Any] = {}
        self._batches: dict[int, list[tuple[int, int]]] = {}  # of each update
        self._policy = policy if policy is not None else RollbackPolicy()
        self._settings = settings if settings is not None else load_settings(None, os.environ)
        self._check_every = check_every
        self._watch: Watch | None = None
        self._evidence: Evidence | None = None
        self.details: Details | None = None  # what was known when it was noticed
        self._ranks: Ranks | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is loaded now."""
        self.diagnosis = None
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        scheduler = trainer.lr_scheduler_configs[0].scheduler if trainer.lr_scheduler_configs else None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        parts = Parts(model=pl_module, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        self._watch = Watch(parts, self._settings, self._policy, check_every=self._check_every)
        self._watch.restart(trainer.global_step)
        self._evidence = Evidence(parts, self._watch.recent, allow=self._settings.allow_nonfinite)
        self._ranks = self._ranks or ranks_of_training()
        saved = float(self._loaded.get("lr_factor", 1.0))
        if self.target is None:
            self.lr_factor = saved
        scale_learning_rate(optimizer, scheduler, self.lr_factor / saved)
        if self.target is not None and self.target.reset_scale is not None:
            raise_loss_scale(scaler, self.target.reset_scale)
        self._watch.look(trainer.global_step)
        self._raise_if_sick()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judge the update; Lightning saves after this."""
        assert self._watch is not None
        here = (trainer.current_epoch, batch_idx)
        self._batches.setdefault(trainer.global_step, []).append(here)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if here not in self.left_out:
            self._watch.observe(trainer.global_step, loss)
        self._watch.after_step(trainer.global_step)
        self._raise_if_sick()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Look before anything is written; on all ranks."""
        if self._watch is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._watch.look(trainer.global_step)  # also while it validates: ModelCheckpoint saves then too
            self._raise_if_sick()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look once more, for the script may save the model now."""
        if self._watch is not None:
            self._watch.look(trainer.global_step)
            self._raise_if_sick()

    def state_dict(self) -> dict[str, Any]:
        """What Lightning leaves out of its checkpoints: the random numbers; and the factor of the learning rate."""
        rng = to_text(encode_state(capture_rng(), path="rng")).decode()
        return {"rng": rng, "lr_factor": self.lr_factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember it until training begins."""
        self._loaded = dict(state_dict)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the random numbers back, before Lightning makes the iterator of the first epoch: that draws a seed."""
        rng = self._loaded.pop("rng", None)
        if rng is not None:
            restore_rng(decode_state(from_text(rng.encode())))

    def leave_out(self, first: int, last: int) -> None:
        """The batches of these updates are not trained on any more."""
        for update in range(first, last + 1):
            self.left_out |= set(self._batches.get(update, ()))

    def _raise_if_sick(self) -> None:
        assert self._watch is not None
        assert self._ranks is not None
        found = agree(self._ranks, self._watch.sick)
        if found is not None:
            self.diagnosis = found
            if self._evidence is not None:
                self.details = self._evidence.gather(found.onset_step, found.cause or "")
                self._evidence.close()
            raise SickTrainingError(f"training was stopped at step {found.step}: {found.reason}", known_good=None)


def fit(
    trainer: Any,
    module: Any,
    *data: Any,
    policy: RollbackPolicy | None = None,
    check_every: int = 50,
    save_every: int = 1,
    daemon: str = "off",
    **arguments: Any,
) -> None:
    """``trainer.fit(module, *data, **arguments)`` that resumes at the newest known-good, unless a ``ckpt_path`` is
    given (None: anew), and goes back to it when training turns sick.

    The Trainer's plugins hold a `GuardedIO`; each save was verified by it. `save_every` is how many updates lie between
    saves, as far as the policy asks. Batches that did harm are left out by a ``training_step`` that returns None.
    RollbackExhausted when the budget is spent, NoKnownGoodError when training turns sick before a good save.
    """
    if trainer.world_size > 1:
        hint = "with several ranks GuardCallback() and GuardedIO stop training, and a restart resumes at known-good"
        raise SettingsError("fit() goes back in one process only so far", hint=hint)
    io = trainer.strategy.checkpoint_io
    if not isinstance(io, GuardedIO):
        raise SettingsError("the Trainer does not save by a GuardedIO", hint="Trainer(plugins=[GuardedIO(run)])")
    callback = GuardCallback(check_every=check_every, policy=policy, settings=io.settings)
    trainer.callbacks.insert(0, callback)
    guarded = _guard(io, policy, daemon)
    newest = guarded.newest() if guarded is not None and "ckpt_path" not in arguments else None
    if newest is not None:
        arguments["ckpt_path"] = newest.path
    own = vars(module).get("training_step")
    module.training_step = _leaving_out(module.training_step, trainer, callback)
    try:
        while True:
            try:
                trainer.fit(module, *data, **arguments)
                return
            except SickTrainingError:
                found = callback.diagnosis
                if found is None:
                    raise
            guarded = guarded or _guard(io, policy, daemon)
            if guarded is None:
                raise NoKnownGoodError(f"{found.reason}; nothing that was saved is good")
            callback.target = target = guarded.back(found, save_every=save_every, details=callback.details)
            if target.skip is not None:
                callback.leave_out(*target.skip)
            callback.lr_factor *= target.lr_factor
            arguments["ckpt_path"] = target.path
    finally:
        if own is not None:
            module.training_step = own
        else:
            del module.training_step
        trainer.callbacks.remove(callback)
        if guarded is not None:
            guarded.close()


def _guard(io: GuardedIO, policy: RollbackPolicy | None, daemon: str) -> GuardedRun | None:
    """The run in the series of its known-good; None while there is none."""
    try:
        series = io.series or find_known_good(io.open_run()).series
    except NoKnownGoodError:
        return None
    return GuardedRun(io.url, series=series, settings=io.settings, policy=policy, daemon=daemon)


def _leaving_out(step: Any, trainer: Trainer, callback: GuardCallback) -> Any:
    """A training_step that makes no update for batches that did harm: Lightning allows it to return None."""

    def training_step(batch: Any, batch_idx: int, *more: Any, **named: Any) -> Any:
        if (trainer.current_epoch, batch_idx) in callback.left_out:
            return None
        return step(batch, batch_idx, *more, **named)

    # Lightning calls it with as many arguments as the module's own takes.
    return functools.wraps(step)(training_step)
