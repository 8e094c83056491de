"""What a guard observes: signals and reads of the tensors, remembered as a state of health."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ckptguard.decisions.health import Diagnosis, Health, Limits, Signal, overdue
from ckptguard.decisions.rollback import RollbackPolicy
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.signals.device_signals import DeviceSignals, loss_scale, on_device
from ckptguard.training.signals.incident_evidence import IncidentEvidence, SampleBuffer
from ckptguard.training.signals.weights import PendingLook, first_of, model_tensors, state_tensors
from ckptguard.values.incident import Details, Resumed

_log = logging.getLogger("ckptguard")


class TrainingMonitor:
    """Takes what is known about each update. `sick` is the first sickness since `restart`, or None.

    `health` is the memory, `recent` the last signals, `evidence` is for an incident's report. Bad input never raises,
    and only a read of the tensors waits for a device. `allow` has patterns of tensors that may be infinite. `share`
    turns this rank's bad tensor (or None) into that of all ranks. Then all ranks must read at the same moments.
    """

    def __init__(self, parts: TrainingParts, policy: RollbackPolicy, *, allow: Sequence[str] = ()) -> None:
        self._parts, self.allow = parts, allow
        self._limits = Limits(nan_losses=policy.nan_losses, scale_skips=policy.scale_skips, spikes=policy.spikes)
        self._check_every, self._most_unsaved = policy.check_every, policy.unsaved
        self._unsaved_since: int | None = -1  # the last save before the one that was reported
        self._last_look = 0
        self._delayed = DeviceSignals()
        self._looking: tuple[int, PendingLook] | None = None
        self._warned = False
        self.share: Callable[[str | None], str | None] = lambda name: name
        self.health = Health()
        self.sick: Diagnosis | None = None
        self.recent = SampleBuffer(parts.optimizer)
        self.evidence = IncidentEvidence(parts, self.recent, allow=allow)

    def follow(self, parts: TrainingParts, step: int) -> None:
        """Continue after update `step` with these objects, and with the known baselines."""
        self.close()
        self._parts = parts
        self.recent.optimizer = parts.optimizer
        self.evidence = IncidentEvidence(parts, self.recent, allow=self.allow)
        self.restart(step)
        self.evidence.begin()
        self.evidence.resumed = Resumed(step=step) if step else None

    def close(self) -> None:
        """Remove the hook from the model."""
        self.evidence.close()

    def details_of(self, sick: Diagnosis) -> Details:
        """Return everything known about a sickness now, before anything is restored."""
        return self.evidence.gather(sick.onset_step, sick.cause or "", through=sick.onset_through)

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

        Returns what is known so far.
        """
        numbers = self._number(loss), self._number(grad_norm), loss_scale(self._parts.scaler)
        if error is None and (self._delayed.waiting or any(map(on_device, numbers))):
            self._delayed.put(step, numbers, skipped)
            return self._take_in(self._delayed.ready()) or Diagnosis(step=step)
        text = None
        if error is not None:
            self.flush()
            text = f"{type(error).__name__}: {error}"
        known, norm, scale = (None if number is None else float(number) for number in numbers)
        signal = Signal(step=step, loss=known, grad_norm=norm, scale=scale, skipped=skipped, error=text)
        return self._take_in((signal,)) or Diagnosis(step=step)

    def flush(self) -> None:
        """Take the signals that are still on their way from a device."""
        if self._delayed.waiting:
            self._take_in(self._delayed.flush())
        self._finish_look(wait=True)

    def look(self, step: int) -> Diagnosis:
        """Read weights, buffers and optimizer state after an update, and all signals up to it."""
        self.flush()
        self._last_look = step
        looks = self._parts.model is not None
        return self.take_in(Signal(step=step, looked=looks, bad_tensor=self._bad_tensor() if looks else None))

    def after_step(self, step: int, *, must_know: bool = False) -> None:
        """Handle a complete update: every `check_every` read the tensors without waiting for a device.

        With `must_know` this state will be saved, so read them at once.
        """
        if must_know:
            self.look(step)
            return
        self._finish_look(wait=False)
        if step - self._last_look < self._check_every:
            return
        tensors = self._tensors()
        if not any(on_device(tensor) for _, tensor in tensors):
            self.look(step)
        elif self._looking is None:
            self._last_look = step
            self._looking = (step, PendingLook(tensors))

    def unsaved(self, step: int, last_saved: int | None, save_every: int) -> str | None:
        """Return a sentence if no state was saved for too long, once for each last save."""
        reason = overdue(step, last_saved, save_every=save_every, most=self._most_unsaved)
        if reason is None or self._unsaved_since == last_saved:
            return None
        self._unsaved_since = last_saved
        return reason

    def restart(self, step: int) -> None:
        """Forget everything: a verified good state of update `step` was loaded."""
        self._last_look = step
        self.health = self.health.restarted(step)
        self._delayed.forget()
        self.recent.restart(step, onset=self.sick.onset_step if self.sick is not None else None)
        self._looking = None
        self.sick = None

    def take_in(self, signal: Signal) -> Diagnosis:
        """Judge one signal as it is, without reading tensors."""
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

    def _number(self, value: Any) -> Any:
        """Return a float, or a tensor of one number on a device; None if it is not a number."""
        if value is None or type(value) is float:
            return value
        try:
            if not hasattr(value, "detach"):
                return float(value)
            value = value.detach()
            if hasattr(value, "to_local"):
                value = value.to_local()  # send no message to other ranks from here
            if value.is_complex() or not value.numel():
                raise TypeError("a tensor of real numbers is expected")
            if value.dim():
                value = value.float().mean() if value.numel() != 1 else value.reshape(())
            return value if on_device(value) else float(value)
        except Exception as error:  # whatever it is, it is not a number
            if not self._warned:
                self._warned = True
                _log.warning("observe() was given a %s, which is not a number: %s", type(value).__name__, error)
            return None
