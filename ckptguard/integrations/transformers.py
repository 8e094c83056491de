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
from collections.abc import Generator, Iterator
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from ckptguard.decisions.health import Diagnosis
from ckptguard.decisions.rollback_policy import RateCut, RollbackPolicy
from ckptguard.errors import RollbackExhausted, SettingsError
from ckptguard.integrations.guarded_run import GuardedRun
from ckptguard.integrations.trainer_callback import SERIES, GuardCallback, SkippedUpdates, parts_of
from ckptguard.runs.settings_file import GivenSettings
from ckptguard.training.rollback import rollbacks as going_back
from ckptguard.training.rollback.rollbacks import Rollback
from ckptguard.training.saving.stores import Loaded
from ckptguard.training.state.progress import adjust, cut_after
from ckptguard.values.incident import Details
from ckptguard.values.own_log import log as _log

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
    start: Loaded | str | None = None
    try:
        if resume_from_checkpoint is True:
            start = guarded.newest()
        elif isinstance(resume_from_checkpoint, str):
            start = resume_from_checkpoint
        else:
            guarded.on_first("starting from scratch", lambda: _refuse_used(guarded))
        with SkippedUpdates(trainer) as left_out:
            rounds = _Rounds(trainer, guarded, left_out, arguments)
            rounds.begin_at(start)
            with _instead_of_other_guards(trainer, rounds):
                for _ in going_back.train(rounds):
                    pass
        guarded.judge_last_save()
        return rounds.output
    finally:
        guarded.close()


class _Rounds(GuardCallback):
    """One ``trainer.train`` after the other: the callback for them, and the `Training` that they are together."""

    def __init__(
        self, trainer: Trainer, guarded: GuardedRun, left_out: SkippedUpdates, arguments: dict[str, Any]
    ) -> None:
        super().__init__(settings=guarded.settings, policy=guarded.policy)
        self.output: Any = None  # of the last one
        self.guarded = self._guarded = guarded
        self.left_out = self._left_out = left_out
        self._monitor.recent.curve = guarded.curve
        self._trainer, self._arguments = trainer, arguments
        self._lowest_scale: float | None = None
        self._cut = RateCut()
        self._cuts: dict[int, RateCut] = {}  # with which each step was saved

    def begin_at(self, start: Loaded | str | None) -> None:
        """Where the next ``trainer.train`` begins. Of a mere path the step is not known."""
        self._path = start.path if isinstance(start, Loaded) else start
        self._begun = start.step if isinstance(start, Loaded) else None

    def stretch(self) -> Generator[None, None, Diagnosis | None]:
        """One ``trainer.train``."""
        yield from ()  # the Trainer makes the updates
        try:
            self.output = self._trainer.train(resume_from_checkpoint=self._path, **self._arguments)
            sick = self.diagnosis
        except Exception as error:
            sick = self.judge_error(error, step=self._trainer.state.global_step + 1)
            if sick is None:
                raise
        if sick is not None:
            return self._narrowed(sick)
        self._refuse_an_idle_end(self._trainer.state.global_step)
        return None

    def go_back(self, sick: Diagnosis) -> Rollback:
        """Choose the next start."""
        return self._guarded.go_back(sick, save_every=self._save_every, details=self.details or Details())

    def leave_out(self, first: int, last: int) -> None:
        """Make none of these updates."""
        self._left_out.updates |= set(range(first, last + 1))
        self._guarded.curve.skip(first, last)

    def arrive(self, went: Rollback) -> None:
        """Have the next ``trainer.train`` begin there."""
        self._left_out.forget()
        self._cut = self._cut.after(went.decision, last=went.last)
        self._lowest_scale = went.decision.reset_scale
        self.begin_at(went.loaded)
        if self._trainer.is_deepspeed_enabled:
            # Its engine ends with its ``trainer.train``; for the next one the Trainer must make all of it anew.
            assert self._trainer.model is not None
            self._trainer.model_wrapped = self._trainer.model
            self._trainer.optimizer = self._trainer.lr_scheduler = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Everything is loaded now: see that it is healthy, and lower the rate or raise the loss scale as decided."""
        saved = self._cuts.get(state.global_step, RateCut())
        self._cut = adjust(parts_of(kw), self._cut, saved=saved, lowest_scale=self._lowest_scale)
        super().on_train_begin(args, state, control, **kw)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Give the learning rate back once enough updates were healthy."""
        super().on_step_end(args, state, control, **kw)
        self._cut = cut_after(parts_of(kw), self._cut, self._guarded.policy, state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Protect the new save, and remember its learning rate."""
        self._cuts[state.global_step] = self._cut
        super().on_save(args, state, control, **kw)

    def conclude(self) -> None:
        """The next round begins after the Trainer has returned."""

    def _narrowed(self, sick: Diagnosis) -> Diagnosis:
        """The same, with what the losses of all ranks say about which updates did the harm."""
        healthy = (sick.onset_step or sick.step) - 1
        reports = self._guarded.ranks.gather(self._left_out.first_bad_loss(after=healthy))
        first = min((update for update in reports if update is not None), default=None)
        if first is None:
            return sick
        # Every later loss was computed from what it, or the update before it, had harmed. A read of the tensors knows
        # no better than the losses of all updates which one was the first.
        sign = min(sick.step if sick.cause in ("weights", "grad_norm") else sick.surely_by, first)
        began = min(sign, max(healthy + 1, self._left_out.trained_before(first)))
        through = sign if began < sign else None
        return dataclasses.replace(sick, onset_step=began, onset_through=through, suspect_through=first)

    def _refuse_an_idle_end(self, step: int) -> None:
        """RollbackExhausted if training reached its end only because all that was left of it was left out."""
        begun = self._begun if self._begun is not None else step
        rest = range(begun + 1, step + 1)
        if not rest or not self._left_out.updates.issuperset(rest):
            return
        reason = (
            f"since training went back to step {begun} no update was made: all {len(rest)} up to the end were suspect"
        )
        if len(rest) > self._save_every:
            hint = "look more often (RollbackPolicy(check_every=...)), and fix the cause: ckptguard incident RUN"
            raise RollbackExhausted(reason, report=None, hint=hint)
        _log.warning("%s", reason)

    @property
    def _save_every(self) -> int:
        """Updates between two saves, as far as the settings say."""
        state, args = self._trainer.state, self._trainer.args
        if args.save_strategy == "steps" and state.save_steps:
            return max(1, int(state.save_steps))
        return max(1, state.max_steps // max(1, state.num_train_epochs))


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


def _refuse_used(guarded: GuardedRun) -> None:
    if any(c.series == SERIES for c in guarded.view().checkpoints):
        raise SettingsError(
            f"{guarded.run.url} holds checkpoints already: training that starts from scratch could go back to them",
            hint="resume_from_checkpoint=True, or another output_dir",
        )
