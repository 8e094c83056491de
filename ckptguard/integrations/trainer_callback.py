"""The callback that watches Hugging Face's Trainer, vetoes a poisoned save, and stops training; and updates left out.

The Trainer counts its position in the data by its updates. So the batches of a harmful update are drawn and counted,
but there is no forward pass, backward pass or optimizer step for them. All later batches come at the same steps as
before, also after another resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ckptguard.decisions.health import Diagnosis, Signal
from ckptguard.decisions.rollback_policy import RollbackPolicy, policy_of
from ckptguard.errors import CkptguardError, NoKnownGoodError, SettingsError, SickTrainingError
from ckptguard.integrations.guarded_run import GuardedRun, instead, open_guarded
from ckptguard.recover.verify_pending import verify_pending
from ckptguard.runs.find_known_good import KnownGood, Wanted, find_known_good
from ckptguard.runs.settings_file import GivenSettings, given_settings, training_settings
from ckptguard.training.client import let_daemon_verify
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.options import asks_daemon
from ckptguard.training.rollback.incident_log import begin_incident, end_incident
from ckptguard.training.signals.monitor import TrainingMonitor
from ckptguard.values.incident import Details
from ckptguard.values.own_log import log as _log

SERIES = "checkpoint-#"


class GuardCallback(TrainerCallback):
    """Guards one Trainer. The run is ``args.output_dir`` unless `run` says otherwise.

    A sick state vetoes the save and stops training. The state is sick if the gradient norm, weights, buffers or
    optimizer state are not finite. It is also sick if a loss scaler or DeepSpeed skipped several updates in a row. With
    ``on_sick="raise"`` ``trainer.train()`` then raises SickTrainingError, which names the known-good path: so no script
    goes on to save a poisoned final model. With ``on_sick="stop"`` it returns, and `sick` holds the error. No other
    failure of the guard ends training.

    `policy` says when training counts as sick. See `GuardedRun` for the rest; `deadline` is the longest wait for
    verdicts that are still pending.
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        on_sick: str = "raise",
        policy: RollbackPolicy | None = None,
        settings: GivenSettings = None,
        daemon: str = "auto",
        deadline: float = 120.0,
    ) -> None:
        if on_sick not in ("raise", "stop"):
            raise SettingsError(f'on_sick must be "raise" or "stop", not {on_sick!r}')
        asks_daemon(daemon)
        policy = policy_of(policy)
        self.sick: SickTrainingError | None = None
        self.guarded: GuardedRun | None = None
        self.left_out: SkippedUpdates | None = None
        self.details: Details | None = None  # what was known when it was noticed
        self._url, self._raises, self._deadline = run, on_sick == "raise", deadline
        self._guarding = {"settings": settings, "daemon": daemon, "deadline": deadline}
        self._check_every = policy.check_every
        allow = given_settings(settings, training_settings).allow_nonfinite if settings is not None else ()
        self._monitor = TrainingMonitor(TrainingParts(model=None), policy, allow=allow)
        self._monitor.share = self._on_any_rank

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The first sickness since training began, or None."""
        return self._monitor.sick

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Open the run, have it guarded, and see that training begins with a healthy state."""
        self.sick, self.details = None, None
        self._open(self._url or args.output_dir or ".")
        self._monitor.follow(parts_of(kw), state.global_step)
        self._look(state, control)
        if self.diagnosis is not None and self._raises:
            self._end_sick(self.diagnosis)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Look at the gradient norm, which is told before the save of the same step."""
        norm, loss = (self._logged(kw.get("logs"), name) for name in ("grad_norm", "loss"))
        if (norm is None and loss is None) or self._is_left_out(state.global_step):
            return
        signal = Signal(step=state.global_step, loss=loss, grad_norm=norm)
        wants_look = self._monitor.health.wants_look(signal)
        if self._monitor.health.skips:
            self._monitor.recent.append(signal)  # the norm of an update that was skipped did no harm
        else:
            self._heed(self._monitor.take_in(signal), state, control)
        if wants_look and self.diagnosis is None:
            self._look(state, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Count skipped updates; look at weights and buffers before each save, and now and then."""
        if self.left_out is not None and self._is_left_out(state.global_step):
            self.left_out.after_update(state.global_step)
        else:
            skipped = bool(getattr(kw.get("optimizer"), "step_was_skipped", False))
            signal = Signal(step=state.global_step, skipped=skipped)
            self._heed(self._monitor.take_in(signal), state, control)
        if control.should_save or state.global_step % self._check_every == 0:
            self._look_before_save(state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """The same where saves come at the end of an epoch."""
        if control.should_save:
            self._look_before_save(state, control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Look after an evaluation too: with ``save_strategy="best"`` only its result decides about a save."""
        self._look(state, control)
        if self.guarded is not None:
            self.guarded.protect()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Protect the new save, beside training: the next save's rotation may delete it."""
        if args.logging_strategy == "no":
            self._monitor.say_if_unheard(state.global_step, 'let the Trainer log them, by logging_strategy="steps"')
        if self.guarded is not None:
            self.guarded.protect_beside()
            self.guarded.curve.saved()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Look once more, for the script may save the model now."""
        if self.guarded is not None:
            self.guarded.wait_for_protection()
        if self.diagnosis is None:
            self._look(state, control)
        self.conclude()

    def _open(self, url: str) -> None:
        """Open the run; a run that cannot be opened is not guarded, and training goes on."""
        if self.guarded is None:
            self.guarded = open_guarded(url, series=SERIES, **self._guarding)
            if self.guarded is not None:
                self._monitor.allow = self.guarded.settings.allow_nonfinite
                self._monitor.recent.curve = self.guarded.curve

    def conclude(self) -> None:
        """The end of training: say where to go back to, and raise if it is sick."""
        if self.diagnosis is not None:
            self._end_sick(self.diagnosis)
        elif self.guarded is not None:
            self.guarded.judge_last_save()
        self._close()

    def judge_error(self, error: Exception, *, step: int) -> Diagnosis | None:
        """The sickness that an exception out of the training loop tells of; None if it is any other one."""
        found = self._monitor.take_in(Signal(step=step, error=str(error)))
        return found if found.sick else None

    def _logged(self, logs: Any, name: str) -> float | None:
        number = self._monitor.reader.read(name, logs.get(name)) if isinstance(logs, Mapping) else None
        return number if isinstance(number, float) else None

    def _is_left_out(self, update: int) -> bool:
        return self.left_out is not None and update in self.left_out.updates

    def _look(self, state: TrainerState, control: TrainerControl) -> None:
        """Read the tensors. Of several ranks all look at the same steps, and one that finds something stops all."""
        self._heed(self._monitor.look(state.global_step), state, control)

    def _on_any_rank(self, name: str | None) -> str | None:
        if self.guarded is not None and self.guarded.ranks.any(name is not None):
            return name or "a tensor of another rank"
        return name

    def _heed(self, found: Diagnosis, state: TrainerState, control: TrainerControl) -> None:
        if not found.sick:
            if self.left_out is not None:
                self.left_out.forget(through=self._monitor.health.healthy_through)
            return
        if self.details is None:
            self.details = self._monitor.details_of(found)
            _log.error("step %d: %s: training stops, nothing is saved", state.global_step, found.reason)
        control.should_save = False
        control.should_training_stop = True

    def _look_before_save(self, state: TrainerState, control: TrainerControl) -> None:
        """The save that comes rotates older ones away: what is not protected yet must be now."""
        self._look(state, control)
        if control.should_save and self.guarded is not None:
            self.guarded.protect()

    def _end_sick(self, diagnosis: Diagnosis) -> None:
        leads = self.guarded is not None and self.guarded.leads
        known_good = self._report(self.guarded, diagnosis) if self.guarded is not None and leads else None
        self.sick = _error(diagnosis, known_good)
        _log.error("%s", self.sick.message)
        if self._raises:
            self._close()
            raise self.sick

    def _close(self) -> None:
        self._monitor.close()
        if self.guarded is not None:
            self.guarded.close()
            self.guarded = None

    def _report(self, guarded: GuardedRun, found: Diagnosis) -> KnownGood | None:
        """Record the incident and find the known-good from before it; the daemon verifies what is pending, or we do."""
        run = guarded.run
        incident = begin_incident(
            run,
            step=found.step,
            cause=found.cause or "numeric",
            reason=found.reason,
            evidence=found.evidence,
            details=self.details or Details(onset=found.onset_step),
            source="callback",
        )
        known_good = None
        before = (found.onset_step or found.step) if found.cause == "loss_scale" else found.step
        try:
            if let_daemon_verify(run, before_step=before, series=SERIES, wait_seconds=self._deadline) is None:
                verify_pending(guarded.view(), Wanted(before_step=before))
            known_good = find_known_good(run, before_step=before, series=SERIES)
        except NoKnownGoodError:
            pass
        except (CkptguardError, OSError) as error:
            _log.warning("the known-good checkpoint could not be asked for: %s", error)
        action = f"training was stopped at step {found.step}, and its state was not saved"
        id = known_good.id if known_good is not None else None
        end_incident(run, incident, action=action, known_good=id, state="open")
        return known_good


def parts_of(given: dict[str, Any]) -> TrainingParts:
    """What a callback of the Trainer is given."""
    optimizer = given.get("optimizer")
    scaler = getattr(optimizer, "scaler", None)
    return TrainingParts(given.get("model"), optimizer, given.get("lr_scheduler"), scaler, framework="trainer")


class SkippedUpdates:
    """Wraps ``trainer.training_step`` and ``trainer.log`` while it is entered.

    It leaves `updates` out (numbered from 1, as steps are) of training and of all averages. Of the others it notes what
    the loss says about when harm was done.
    """

    def __init__(self, trainer: Any) -> None:
        self.updates: set[int] = set()
        self._trainer = trainer
        self._step, self._log = trainer.training_step, trainer.log
        self._wrapped = instead(trainer, training_step=self._training_step, log=self._log_trained)
        self._losses: list[tuple[int, Any]] = []
        self._scale: float | None = None

    def __enter__(self) -> Self:
        self._wrapped.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._wrapped.__exit__(*exc)

    def trained_before(self, update: int) -> int:
        """The last update before this one that is not left out."""
        return next(number for number in range(update - 1, -1, -1) if number not in self.updates)

    def first_bad_loss(self, *, after: int) -> int | None:
        """The first update after `after` whose loss was not finite on this rank; None if there is none."""
        losses = [(update, finite) for update, finite in self._losses if update > after]
        if not losses:
            return None
        finite = torch.stack([flag.to(losses[0][1].device) for _, flag in losses]).tolist()
        return next((update for (update, _), fine in zip(losses, finite, strict=True) if not fine), None)

    def forget(self, *, through: int | None = None) -> None:
        """The losses of updates up to `through` are of no interest any more; None: of all."""
        self._losses = [] if through is None else [(u, f) for u, f in self._losses if u > through]

    def after_update(self, update: int) -> None:
        """Keep an update that was left out from counting in the averages of the Trainer. Under a loss scaler it is left
        out as an overflow is: give the scaler back the scale that this cost."""
        if update in self.updates:
            for name in ("_globalstep_last_logged", "_initial_global_step"):  # the Trainer divides by the steps since
                since = getattr(self._trainer, name, None)
                if isinstance(since, int):
                    setattr(self._trainer, name, since + 1)
        scaler = _scaler(self._trainer)
        if update in self.updates and scaler is not None and self._scale is not None:
            scaler.update(self._scale)
        self._scale = None

    def _training_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        update = self._trainer.state.global_step + 1
        if update not in self.updates:
            loss = self._step(model, inputs, *arguments, **named)
            if isinstance(loss, torch.Tensor) and not loss.is_meta:
                self._losses.append((update, loss.detach().isfinite().all()))
            return loss
        scaler = _scaler(self._trainer)
        if scaler is not None:
            # It insists on a gradient to look at. One that overflows makes it leave the update out by itself.
            self._scale = self._scale if self._scale is not None else float(scaler.get_scale())
            trained = next(p for p in model.parameters() if p.requires_grad and p.numel())
            trained.grad = torch.full_like(trained, float("inf"))
        return torch.zeros((), device=self._trainer.args.device)

    def _log_trained(self, logs: dict[str, float], *arguments: Any, **named: Any) -> Any:
        """Log the averages of the trained updates. The gradient norm of one that was left out is of nothing."""
        if self._trainer.state.global_step in self.updates:
            logs.pop("grad_norm", None)
        return self._log(logs, *arguments, **named)


def _scaler(trainer: Any) -> Any:
    scaler = getattr(trainer.accelerator, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def _error(found: Diagnosis, known_good: KnownGood | None) -> SickTrainingError:
    stopped = f"training was stopped at step {found.step}: {found.reason}."
    if known_good is None:
        return SickTrainingError(f"{stopped} There is no known-good checkpoint from before it.", known_good=None)
    path = known_good.path
    return SickTrainingError(
        f"{stopped} The last known-good checkpoint is {path} (step {known_good.step}, {known_good.reason}).",
        known_good=path,
        hint=f"fix the cause, then trainer.train(resume_from_checkpoint={path!r})",
    )
