"""Hugging Face Trainer, and trl's, which are Trainers: no poisoned save, and training that goes back by itself.

``ckptguard.integrations.transformers.train(trainer)`` instead of ``trainer.train()``; or, to be stopped only,
``trainer.add_callback(ckptguard.integrations.transformers.GuardCallback())``

The Trainer's own log cannot be trusted. With its default settings it prints a loss of 0 where the loss is NaN, and goes
on training and saving. The gradient norm is the honest signal, and the weights themselves are looked at before each
save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from ckptguard.decisions.health import Diagnosis
from ckptguard.decisions.rollback import RollbackPolicy
from ckptguard.errors import RollbackExhausted, SettingsError
from ckptguard.integrations.guarded_run import GuardedRun, ResumeTarget
from ckptguard.integrations.trainer_callback import SERIES, GuardCallback, SkippedUpdates
from ckptguard.runs.settings_file import GivenSettings
from ckptguard.training.content.training_parts import scale_learning_rate
from ckptguard.training.signals.device_signals import raise_loss_scale

_log = logging.getLogger("ckptguard")

__all__ = ["GuardCallback", "train"]


def train(
    trainer: Trainer,
    *,
    resume_from_checkpoint: bool | str | None = True,
    policy: RollbackPolicy | None = None,
    run: str | None = None,
    daemon: str = "auto",
    settings: GivenSettings = None,
    deadline: float = 120.0,
    **arguments: Any,
) -> Any:
    """Run ``trainer.train(**arguments)``, and go back to the newest known-good checkpoint when training turns sick.

    Return what ``trainer.train`` returns; the last save has its verdict then. The run is ``args.output_dir`` unless
    `run` says otherwise. Checkpoints newer than the one that training goes back to are quarantined. A rollback that
    replays (``RollbackPolicy(skip=False)``) continues exactly as the Trainer's own resume does. One that skips makes no
    update for the suspect batches; they still count as steps. All ranks call it. Under DeepSpeed the Trainer must have
    made the optimizer itself.

    `resume_from_checkpoint`: by default, or with True, training resumes at the newest known-good checkpoint, or starts
    from the beginning if none is good. False or None starts from the beginning, and refuses a run that holds
    checkpoints. A path is loaded without being verified.

    RollbackExhausted if the policy's budget is spent. NoKnownGoodError if training turns sick before a good checkpoint
    exists. SickTrainingError if even the state that training begins with is sick.
    """
    url = run or trainer.args.output_dir or "."
    guarded = GuardedRun(url, series=SERIES, settings=settings, policy=policy, daemon=daemon, deadline=deadline)
    rounds = _Rounds(guarded)
    path = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
    try:
        if resume_from_checkpoint is True:
            rounds.target = guarded.newest()
        elif path is None:
            guarded.on_first("beginning anew", lambda: _refuse_used(guarded))
        with _instead_of_other_guards(trainer, rounds), SkippedUpdates(trainer) as rounds.left_out:
            while True:
                start = rounds.target.path if rounds.target is not None else path
                output, diagnosis = _one_round(trainer, rounds, start, arguments)
                if diagnosis is None:
                    rounds.refuse_an_idle_end(trainer.state.global_step, save_every=_save_every(trainer))
                    guarded.judge_last_save()
                    return output
                rounds.go_back(diagnosis, save_every=_save_every(trainer))
                _unwrap(trainer)
    finally:
        guarded.close()


class _Rounds(GuardCallback):
    """The callback for one ``trainer.train`` after the other: `target` is where the next one begins."""

    def __init__(self, guarded: GuardedRun) -> None:
        super().__init__(settings=guarded.settings, policy=guarded.policy)
        self.guarded = self._rollbacks = guarded
        self._monitor.recent.curve = guarded.curve
        self.target: ResumeTarget | None = None
        self._lr_factor = 1.0
        self._lr_factors: dict[int, float] = {}  # with which factor each step was saved

    def go_back(self, diagnosis: Diagnosis, *, save_every: int) -> None:
        """Choose the next target, and what is to be left out on the way from there."""
        assert self.left_out is not None
        healthy = (diagnosis.onset_step or diagnosis.step) - 1
        reports = self._rollbacks.ranks.gather(self.left_out.first_bad_loss(after=healthy))
        first = min((update for update in reports if update is not None), default=None)
        if first is not None:  # every later loss was computed from what it, or the update before it, had harmed
            # A read of the tensors knows no better than the losses of all updates which one was the first.
            sign = min(diagnosis.step if diagnosis.cause in ("weights", "grad_norm") else diagnosis.surely_by, first)
            began = min(sign, max(healthy + 1, self.left_out.trained_before(first)))
            through = sign if began < sign else None
            diagnosis = dataclasses.replace(diagnosis, onset_step=began, onset_through=through, suspect_through=first)
        target = self._rollbacks.back(diagnosis, save_every=save_every, details=self.details)
        if target.skip is not None:
            self.left_out.updates |= set(range(target.skip[0], target.skip[1] + 1))
        self.left_out.forget()
        self._lr_factor *= target.lr_factor
        self.target = target

    def refuse_an_idle_end(self, step: int, *, save_every: int) -> None:
        """RollbackExhausted if training reached its end only because all that was left of it was left out."""
        begun = self.target.step if self.target is not None else step
        left_out = self.left_out.updates if self.left_out is not None else set()
        rest = range(begun + 1, step + 1)
        if not rest or not left_out.issuperset(rest):
            return
        reason = (
            f"since training went back to step {begun} no update was made: all {len(rest)} up to the end were suspect"
        )
        if len(rest) > save_every:
            hint = "look more often (RollbackPolicy(check_every=...)), and mend the cause: ckptguard incident RUN"
            raise RollbackExhausted(reason, report=None, hint=hint)
        _log.warning("%s", reason)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Everything is loaded now: see that it is healthy, and lower the rate or raise the loss scale as decided."""
        saved = self._lr_factors.get(state.global_step, 1.0)
        scale_learning_rate(kw.get("optimizer"), kw.get("lr_scheduler"), self._lr_factor / saved)
        if self.target is not None and self.target.reset_scale is not None:
            raise_loss_scale(getattr(kw.get("optimizer"), "scaler", None), self.target.reset_scale)
        super().on_train_begin(args, state, control, **kw)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Protect the new save, and remember its learning rate."""
        self._lr_factors[state.global_step] = self._lr_factor
        super().on_save(args, state, control, **kw)

    def open(self, url: str) -> None:
        """It is open for all rounds."""

    def conclude(self, diagnosis: Diagnosis | None) -> None:
        """The next round begins after the Trainer has returned."""


def _one_round(
    trainer: Trainer, rounds: _Rounds, start: str | None, arguments: dict[str, Any]
) -> tuple[Any, Diagnosis | None]:
    try:
        output = trainer.train(resume_from_checkpoint=start, **arguments)
    except Exception as error:
        diagnosis = rounds.judge_error(error, step=trainer.state.global_step + 1)
        if diagnosis is None:
            raise
        return None, diagnosis
    return output, rounds.diagnosis


@contextlib.contextmanager
def _instead_of_other_guards(trainer: Trainer, rounds: GuardCallback) -> Iterator[None]:
    """A GuardCallback that the user added would end training where this one goes back."""
    others = []
    while (other := trainer.pop_callback(GuardCallback)) is not None:
        others.append(other)
    trainer.add_callback(rounds)
    try:
        yield
    finally:
        trainer.remove_callback(rounds)
        for other in others:
            trainer.add_callback(other)


def _unwrap(trainer: Trainer) -> None:
    """DeepSpeed's engine ends with its ``trainer.train``; for the next one the Trainer must make all of it anew."""
    if trainer.is_deepspeed_enabled:
        assert trainer.model is not None
        trainer.model_wrapped = trainer.model
        trainer.optimizer = trainer.lr_scheduler = None


def _refuse_used(guarded: GuardedRun) -> None:
    if any(c.series == SERIES for c in guarded.view().checkpoints):
        raise SettingsError(
            f"{guarded.run.url} holds checkpoints already: training that begins anew could go back to them",
            hint="resume_from_checkpoint=True, or another output_dir",
        )


def _save_every(trainer: Trainer) -> int:
    """Updates between two saves, as far as the settings say."""
    state = trainer.state
    if trainer.args.save_strategy == "steps" and state.save_steps:
        return max(1, int(state.save_steps))
    return max(1, state.max_steps // max(1, state.num_train_epochs))
