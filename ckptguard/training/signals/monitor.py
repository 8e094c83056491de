"""What a guard observes: signals and reads of the tensors, remembered as a state of health."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ckptguard.decisions.health import Diagnosis, Health, Limits, Signal
from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.signals.device_signals import DeviceSignals, Numbers, loss_scale, on_device
from ckptguard.training.signals.incident_evidence import AutocastProbe, SampleBuffer, gather, tried
from ckptguard.training.signals.read_number import NoAnswerError, NumberReader, aside
from ckptguard.training.signals.weights import PendingLook, first_of, model_tensors, state_tensors
from ckptguard.values.incident import Details, Resumed
from ckptguard.values.own_log import log as _log

_LOCK_SECONDS = 60.0  # that an observation waits while another thread reads the tensors


class TrainingMonitor:
    """Takes what is known about each update. `sick` is the first sickness since `restart`, or None.

    `health` is the memory, `recent` has the last signals, `resumed` what training began from. `observe` takes anything
    from any thread, never raises and never waits forever. Only a read of the tensors waits for a device. `allow` has
    patterns of tensors that may be infinite. `share` turns this rank's bad tensor (or None) into that of all ranks.
    Then all ranks must read at the same moments.
    """

    def __init__(self, parts: TrainingParts, policy: RollbackPolicy, *, allow: Sequence[str] = ()) -> None:
        self._parts, self.allow = parts, allow
        self._limits = Limits(nan_losses=policy.nan_losses, scale_skips=policy.scale_skips, spikes=policy.spikes)
        self._check_every = policy.check_every
        self._last_look = 0
        self.reader = NumberReader()
        self._delayed = DeviceSignals(self.reader.say)
        self._lock = threading.RLock()  # one thread at a time changes what is known
        self._looking: tuple[int, PendingLook] | None = None
        self._heard = False  # whether there was a loss or a gradient norm, or a call of observe
        self.share: Callable[[str | None], str | None] = lambda name: name
        self.health = Health()
        self.sick: Diagnosis | None = None
        self.recent = SampleBuffer(parts.optimizer)
        self.resumed: Resumed | None = None
        self._autocast: AutocastProbe | None = None

    def follow(self, parts: TrainingParts, step: int) -> None:
        """Continue after update `step` with these objects, and with the known baselines."""
        self.close()
        self._parts, self._autocast = parts, None
        self.recent.optimizer = parts.optimizer
        self.restart(step)
        self.begin()
        self.resumed = Resumed(step=step) if step else None

    def begin(self) -> None:
        """Begin training. The model gets its hook only now: ``torch.jit.script`` does not accept one."""
        if self._autocast is None:
            self._autocast = tried(lambda: AutocastProbe(self._parts.model), None)

    def close(self) -> None:
        """Remove the hook from the model."""
        if self._autocast is not None:
            self._autocast.remove()

    def details_of(self, sick: Diagnosis) -> Details:
        """Return everything known about a sickness now, before anything is restored."""
        autocast = self._autocast.seen if self._autocast is not None else None
        details = gather(sick, self._parts, self.recent, autocast=autocast, allow=self.allow)
        scaler = details.training.scaler_not_given if details.training is not None else None
        if scaler is not None:
            _log.warning("a %s works here: if it skipped step %s, give it to the guard, as scaler=", scaler, sick.step)
        return msgspec.structs.replace(details, resumed=self.resumed)

    def observe(
        self,
        step: int,
        loss: Any = None,
        grad_norm: Any = None,
        *,
        skipped: bool | None = None,
        error: BaseException | None = None,
    ) -> Diagnosis:
        """Take the signals of an update. Numbers on a device are judged some updates later, under their own step.

        Returns what is known so far. What cannot be read counts as not reported.
        """
        self._heard = True
        try:
            read = self.reader.read
            numbers = read("loss", loss), read("grad_norm", grad_norm), self._scale(), read("skipped", skipped)
            text = None if error is None else _text_of(error)
            if not self._lock.acquire(timeout=_LOCK_SECONDS):
                raise NoAnswerError("another thread reads the tensors")
            try:
                return self._observe(step, numbers, text)
            finally:
                self._lock.release()
        except Exception as failed:  # training goes on, whatever it is
            self.reader.say("update", type(failed), failed)
            return Diagnosis(step=step)

    def _observe(self, step: int, numbers: Numbers, error: str | None) -> Diagnosis:
        if error is not None:
            self.flush()
        elif self._delayed.waiting or not all(value is None or type(value) is float for value in numbers):
            self._delayed.put(step, numbers)
            return self._take_in(self._delayed.ready()) or Diagnosis(step=step)
        # An exception is judged at once, without numbers that a device still has.
        loss, norm, scale, skipped = (value if type(value) is float else None for value in numbers)
        skips = None if skipped is None else skipped != 0.0
        signal = Signal(step=step, loss=loss, grad_norm=norm, scale=scale, skipped=skips, error=error)
        return self._take_in((signal,)) or Diagnosis(step=step)

    def say_if_unheard(self, step: int, hint: str) -> None:
        """Warn once if no loss and no gradient norm was reported up to this update."""
        if not self._heard:
            self._heard = True
            _log.warning("after %s updates no loss and no gradient norm was reported: %s", step, hint)

    def flush(self) -> None:
        """Take the signals that are still on their way from a device."""
        with self._lock:
            if self._delayed.waiting:
                self._take_in(self._delayed.flush())
            self._finish_look(wait=True)

    def look(self, step: int) -> Diagnosis:
        """Read weights, buffers and optimizer state after an update, and all signals up to it."""
        with self._lock:
            self.flush()
            self._last_look = step
            looks = self._parts.model is not None
            return self.take_in(Signal(step=step, looked=looks, bad_tensor=self._bad_tensor() if looks else None))

    def after_step(self, step: int, *, must_know: bool = False) -> None:
        """Handle a complete update: every `check_every` read the tensors without waiting for a device.

        With `must_know` this state will be saved, so read them at once.
        """
        with self._lock:
            if not must_know:
                self._finish_look(wait=False)
                if step - self._last_look < self._check_every:
                    return
                tensors = self._tensors()
                if any(on_device(tensor) for _, tensor in tensors):
                    if self._looking is None:
                        self._last_look, self._looking = step, (step, PendingLook(tensors))
                    return
            self.look(step)

    def restart(self, step: int) -> None:
        """Forget everything: a verified good state of update `step` was loaded."""
        with self._lock:
            self._last_look = step
            self.health = self.health.restarted(step)
            self._delayed.forget()
            self.recent.restart(step, onset=self.sick.onset_step if self.sick is not None else None)
            self._looking = self.sick = None

    def take_in(self, signal: Signal) -> Diagnosis:
        """Judge one signal as it is, without reading tensors."""
        with self._lock:
            self._heard = self._heard or signal.loss is not None or signal.grad_norm is not None
            self.recent.append(signal)
            self.health, diagnosis = self.health.after(signal, self._limits)
            if diagnosis.sick and self.sick is None:
                self.sick = diagnosis
            return diagnosis

    def _take_in(self, signals: Sequence[Signal]) -> Diagnosis | None:
        """Return the last diagnosis; None without signals."""
        diagnosis, bad_tensor, looked = None, None, False
        for signal in signals:
            if self.sick is None and self.health.wants_look(signal):
                # One read for all that arrived together: what is finite now was finite then.
                bad_tensor = bad_tensor if looked else self._bad_tensor()
                looked = True
                signal = msgspec.structs.replace(signal, looked=True, bad_tensor=bad_tensor)
            diagnosis = self.take_in(signal)
        return diagnosis

    def _finish_look(self, *, wait: bool) -> None:
        if self._looking is not None and (wait or self._looking[1].arrived()):
            (step, look), self._looking = self._looking, None
            # If something was not finite, it still is: NaN does not go away.
            bad_tensor = None if look.all_finite() else self._bad_tensor()
            self.take_in(Signal(step=step, looked=True, bad_tensor=bad_tensor))

    def _tensors(self) -> list[tuple[str, Any]]:
        return model_tensors(self._parts.model) + state_tensors(self._parts.optimizer)

    def _bad_tensor(self) -> str | None:
        return self.share(first_of(self._tensors(), self.allow))

    def _scale(self) -> Any:
        try:
            return self.reader.read("loss scale", loss_scale(self._parts.scaler))
        except Exception as error:  # a scaler of the user's
            self.reader.say("loss scale", type(self._parts.scaler), error)
            return None


def _text_of(error: object) -> str:
    """Return the class and text of an exception. Its text may be the user's own code."""
    name = type(error).__name__
    try:
        return aside(lambda: f"{name}: {error}")
    except Exception:
        return name
