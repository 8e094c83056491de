"""Hugging Face Trainer: one line that keeps poisoned saves from being written and says where to go back to.

``trainer.add_callback(ckptguard.integrations.transformers.GuardCallback())``

The Trainer's own log cannot be trusted: with its default settings it prints a loss of 0 where the loss is NaN, and
goes on training and saving. The gradient norm is the honest signal, and the weights themselves are looked at before
each save.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ckptguard.config import Settings
from ckptguard.errors import CkptguardError, NoKnownGoodError, SettingsError, SickTrainingError
from ckptguard.operations.find_known_good import KnownGood, find_known_good
from ckptguard.operations.load_settings import load_settings
from ckptguard.operations.protect import protect_finished
from ckptguard.operations.roll_back import verify_pending
from ckptguard.records.incidents import open_incident
from ckptguard.records.run import Run, open_run
from ckptguard.training.child_daemon import ChildDaemon, ensure_daemon
from ckptguard.training.client import ask_known_good, report_incident
from ckptguard.training.weights import first_non_finite

_OVERFLOWS = 5  # with fp16's loss scaler, an overflow now and then is how it works
_PROTECT_SECONDS = 60.0
_SERIES = "checkpoint-#"
_log = logging.getLogger("ckptguard")


class GuardCallback(TrainerCallback):
    """Guards one Trainer. The run is ``args.output_dir`` unless `run` says otherwise.

    A sick state (a non-finite gradient norm, or non-finite weights or buffers) vetoes the save and stops training.
    With ``on_sick="raise"`` ``trainer.train()`` then raises SickTrainingError, which names the known-good path, so
    that a script cannot go on to save a poisoned final model; with ``on_sick="stop"`` it returns, and `sick` holds
    the error. Nothing else that goes wrong here ever ends training.

    `check_every` is in steps, `deadline` in seconds: the longest wait for verdicts that are still pending.
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        on_sick: str = "raise",
        check_every: int = 50,
        daemon: str = "auto",
        settings: Settings | None = None,
        deadline: float = 120.0,
    ) -> None:
        if on_sick not in ("raise", "stop"):
            raise SettingsError(f'on_sick must be "raise" or "stop", not {on_sick!r}')
        if daemon not in ("auto", "off"):
            raise SettingsError(f'daemon must be "auto" or "off", not {daemon!r}')
        if check_every < 1:
            raise SettingsError(f"check_every must be at least 1 step, not {check_every}")
        self.sick: SickTrainingError | None = None
        self._url = run
        self._raises = on_sick == "raise"
        self._check_every = check_every
        self._daemon = daemon
        self._settings = settings if settings is not None else load_settings(None, os.environ)
        self._deadline = deadline
        self._run: Run | None = None
        self._child: ChildDaemon | None = None
        self._protecting: threading.Thread | None = None
        self._overflows = 0
        self._found: tuple[int, str, dict[str, Any]] | None = None  # step, reason, evidence

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the run and have it guarded."""
        self.sick, self._found, self._overflows = None, None, 0
        if not state.is_world_process_zero:
            return
        try:
            self._run = open_run(
                self._url or args.output_dir or ".",
                records=self._settings.records,
                patterns=self._settings.patterns,
                must_exist=False,
            )
            if self._daemon == "auto":
                self._child = ensure_daemon(self._run, self._settings)
        except (CkptguardError, OSError) as error:
            _log.warning("ckptguard: %s is not guarded: %s", args.output_dir, error)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at the gradient norm, which is told before the save of the same step."""
        norm, loss = _number(logs, "grad_norm"), _number(logs, "loss")
        if norm is None:
            return
        if math.isfinite(norm):
            self._overflows = 0
            return
        self._overflows += 1
        if not args.fp16 or self._overflows >= _OVERFLOWS:
            shown = " while the loss is printed as 0" if loss == 0.0 else ""
            self._stop(state, control, f"the gradient norm is {norm}{shown}", {"grad_norm": norm, "loss": loss})

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Look at weights and buffers before each save, and now and then."""
        if control.should_save or state.global_step % self._check_every == 0:
            self._look(state, control, model)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """The same where saves come at the end of an epoch."""
        if control.should_save:
            self._look(state, control, model)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Look after an evaluation too: with ``save_strategy="best"`` only its result decides about a save."""
        self._look(state, control, model)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Protect the new save, beside training: the next save's rotation may delete it."""
        run = self._run
        if run is not None:
            self._wait_for_protection()
            self._protecting = threading.Thread(target=self._protect, args=(run,), daemon=True)
            self._protecting.start()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look once more, for the script may save the model now; say where to go back to, and raise if it is sick."""
        self._wait_for_protection()
        if self._found is None:
            self._look(state, control, kwargs.get("model"))
        if self._found is not None:
            step, reason, evidence = self._found
            known_good = self._report(step, reason, evidence) if self._run is not None else None
            self.sick = _error(step, reason, known_good)
            _log.error("ckptguard: %s", self.sick.message)
        if self._child is not None:
            self._child.stop()
            self._child = None
        if self.sick is not None and self._raises:
            raise self.sick

    def _look(self, state: TrainerState, control: TrainerControl, model: Any) -> None:
        name = first_non_finite(model, self._settings.allow_nonfinite) if model is not None else None
        if name is not None:
            self._stop(state, control, f"{name} is not finite", {"tensor": name})

    def _stop(self, state: TrainerState, control: TrainerControl, reason: str, evidence: dict[str, Any]) -> None:
        if self._found is None:
            self._found = (state.global_step, reason, evidence)
            _log.error("ckptguard: step %d: %s: training stops, nothing is saved", state.global_step, reason)
        control.should_save = False
        control.should_training_stop = True

    def _protect(self, run: Run) -> None:
        try:
            for trouble in protect_finished(run, self._settings):
                _log.warning("ckptguard: %s", trouble)
        except Exception as error:  # beside training, nothing of ours may surface in it
            _log.warning("ckptguard: the new save could not be protected: %s", error)

    def _wait_for_protection(self) -> None:
        if self._protecting is not None:
            self._protecting.join(_PROTECT_SECONDS)
            self._protecting = None

    def _report(self, step: int, reason: str, evidence: dict[str, Any]) -> KnownGood | None:
        """Record the incident and find the known-good from before it; the daemon verifies what is pending, or we do."""
        run = self._run
        assert run is not None
        try:
            told = report_incident(run, step=step, cause="numeric", reason=reason, evidence=evidence, source="callback")
            if not told:
                open_incident(run, step=step, cause="numeric", reason=reason, evidence=evidence, source="callback")
            known = ask_known_good(run, before_step=step, series=_SERIES, wait_seconds=self._deadline)
            if known is None:
                verify_pending(run, self._settings, before_step=step)
            return find_known_good(run, before_step=step, series=_SERIES)
        except NoKnownGoodError:
            return None
        except (CkptguardError, OSError) as error:
            _log.warning("ckptguard: the known-good checkpoint could not be asked for: %s", error)
            return None


def _error(step: int, reason: str, known_good: KnownGood | None) -> SickTrainingError:
    if known_good is None:
        return SickTrainingError(
            f"training was stopped at step {step}: {reason}. There is no known-good checkpoint from before it.",
            known_good=None,
        )
    return SickTrainingError(
        f"training was stopped at step {step}: {reason}. The last known-good checkpoint is {known_good.path} "
        f"(step {known_good.step}, {known_good.reason}).",
        known_good=known_good.path,
        hint=f"mend the cause, then trainer.train(resume_from_checkpoint={known_good.path!r})",
    )


def _number(logs: Mapping[str, Any] | None, name: str) -> float | None:
    value = (logs or {}).get(name)
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
