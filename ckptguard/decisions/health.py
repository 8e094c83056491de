"""Diagnose a run from its own signals. Pure: the same signals give the same diagnosis.

Signs of sickness, the most reliable first:
- Weights or a gradient norm that are not finite: act at once.
- With a loss scaler: several skipped updates in a row, or a scale that fell to its floor. A single skipped update is
  normal, and a new scaler skips updates until it has found its scale.
- A NaN loss beside finite gradients and weights, such as a batch whose labels are all masked: act after several in a
  row.
- Several finite losses or norms in a row far above normal: only if the policy asks for it.

Normal is a running median and its spread over a window. A mean and a standard deviation would follow the outliers.
A spike never enters the window, so a plateau after a jump stays a row of spikes.

A finite loss and gradient norm do not prove that the update left finite weights. They prove only that the weights
before the update were finite. So the first sign of sickness may come one update late.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ckptguard.errors import SettingsError

_SEARCHING = 4  # a new loss scaler may skip this many times the limit before its first update
_FINITE = math.isfinite
_SIGMA_PER_MAD = 1.4826  # of a normal distribution
_RENEWALS = 8  # the median is recomputed this often per window, because it changes slowly
_LONGEST_ERROR = 10_000
# Exceptions of other libraries that report a sick training.
# Only unambiguous sentences: any other exception stays the caller's own.
_CAUSES = (
    # DeepSpeed's dynamic loss scaler; the update before it was skipped too.
    ("loss_scale", re.compile(r"current loss scale already at minimum", re.IGNORECASE)),
    # torch.nn.utils.clip_grad_norm_(..., error_if_nonfinite=True)
    ("grad_norm", re.compile(r"the total norm of order .{1,40} is non-finite", re.IGNORECASE | re.DOTALL)),
    # torch.autograd.detect_anomaly
    ("grad_norm", re.compile(r"function '\w+' returned nan values in its \d+th output", re.IGNORECASE)),
    # torch.multinomial, called by generation and by sampling losses
    ("weights", re.compile(r"probability tensor contains either `?inf`?, `?nan`? or element < 0", re.IGNORECASE)),
    # torch.distributions: logits of NaN
    ("weights", re.compile(r"but found invalid values:.{0,200}\bnan\b", re.IGNORECASE | re.DOTALL)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spikes:
    """The limits above which a value is a spike. A spike exceeds both of them: `sigma` robust deviations above the
    median of the last `window` values, and `factor` times the median. `in_a_row` spikes are a sickness. The first
    `warm_up` values are only recorded."""

    window: int = 128
    warm_up: int = 128
    sigma: float = 10.0
    factor: float = 5.0
    in_a_row: int = 5

    def __post_init__(self) -> None:
        if self.window < _RENEWALS or self.warm_up < _RENEWALS:
            raise SettingsError(f"window and warm_up of Spikes must be at least {_RENEWALS}")
        if self.sigma <= 0 or self.factor <= 1 or self.in_a_row < 1:
            raise SettingsError("Spikes need a sigma above 0, a factor above 1 and at least 1 in a row")


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What is normal for one number. `spikes` counts the latest spikes in a row."""

    recent: tuple[float, ...] = ()
    seen: int = 0
    median: float = 0.0
    spread: float = 0.0
    spikes: int = 0

    def after(self, value: float, limits: Spikes) -> Baseline:
        """Return the baseline after one finite value."""
        if self._is_spike(value, limits):
            return msgspec.structs.replace(self, spikes=self.spikes + 1)
        recent = (*self.recent[-limits.window + 1 :], value)
        seen = self.seen + 1
        median, spread = self.median, self.spread
        if seen % max(limits.window // _RENEWALS, 1) == 0 or seen == limits.warm_up:
            median = _middle(recent)
            spread = _SIGMA_PER_MAD * _middle([abs(v - median) for v in recent])
        return Baseline(recent=recent, seen=seen, median=median, spread=spread)

    def _is_spike(self, value: float, limits: Spikes) -> bool:
        if self.seen < limits.warm_up:
            return False
        above = value - self.median
        return above > limits.sigma * self.spread and above > (limits.factor - 1) * abs(self.median)


_NOTHING_YET = Baseline()


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How many bad signals in a row are tolerated. With `spikes` None, every finite number is normal."""

    nan_losses: int = 5
    scale_skips: int = 5
    scale_floor: float = 1.0
    spikes: Spikes | None = None


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one update. `scale` is the loss scale after it, or None without a scaler.

    `skipped`: whether the optimizer skipped the update; None if only the scale can show it. `error` is the text of an
    exception that the update raised. `looked`: weights and buffers were read after the update. Then `bad_tensor` names
    the first tensor that is not finite.
    """

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    scale: float | None = None
    skipped: bool | None = None
    error: str | None = None
    looked: bool = False
    bad_tensor: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Healthy if `cause` is None, otherwise sick since `onset_step`. States before that update are not suspect.

    The updates from `onset_step` to `suspect_through` may have done the harm (None: to `step`). If it is not known
    which update began it, the onset is a range that ends at `onset_through` (None: it is exactly `onset_step`). That is
    the first one that shows a sign: the updates before it are skipped only if training turns sick again.
    """

    step: int
    cause: str | None = None
    onset_step: int | None = None
    onset_through: int | None = None
    suspect_through: int | None = None
    reason: str = ""
    evidence: dict[str, object] = field(default_factory=dict)

    @property
    def sick(self) -> bool:
        """True if training should roll back."""
        return self.cause is not None

    @property
    def surely_by(self) -> int:
        """The last update that can be the onset."""
        last = self.onset_through if self.onset_through is not None else self.onset_step
        return last if last is not None else self.step


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The memory between signals.

    No loss showed harm through update `healthy_through`. `loss_through` is the last update with a finite loss. A read
    found all tensors finite after update `looked_through`, including those that no loss depends on. `skips` counts the
    latest skipped updates in a row, `skips_in_all` all of them. The latest `nan_losses` losses were not finite, since
    update `nan_since`. `highest_scale` distinguishes a scale that fell to its floor from one that started there.

    Gradients may be accumulated. `norm_through` is the last update with a finite gradient norm (None: no norm was
    reported). `nan_unsettled` is the first later update with a loss that was not finite, unless a later read was clean.
    """

    healthy_through: int = 0
    loss_through: int = 0
    looked_through: int = 0
    nan_losses: int = 0
    nan_since: int | None = None
    norm_through: int | None = None
    nan_unsettled: int | None = None
    skips: int = 0
    skips_in_all: int = 0
    scaler_settled: bool = False
    scale: float | None = None
    highest_scale: float = 0.0
    losses: Baseline = _NOTHING_YET
    norms: Baseline = _NOTHING_YET

    def restarted(self, step: int) -> Health:
        """Return the memory after a good state of update `step` was loaded. Only the baselines are kept."""
        return Health(
            healthy_through=step,
            loss_through=step,
            looked_through=step,
            norm_through=None if self.norm_through is None else step,
            scaler_settled=step > 0,
            losses=msgspec.structs.replace(self.losses, spikes=0),
            norms=msgspec.structs.replace(self.norms, spikes=0),
        )

    def after(self, signal: Signal, limits: Limits) -> tuple[Health, Diagnosis]:
        """Return the memory after one signal, and the diagnosis."""
        skipped = self._was_skipped(signal)
        norm = signal.grad_norm if signal.grad_norm is not None and _FINITE(signal.grad_norm) and not skipped else None
        healthy_through, loss_through, looked_through = self._clean_through(signal)
        nan_losses, nan_since = self._row_of_nan(signal)
        norm_through, nan_unsettled = self._unsettled(signal, norm)
        losses, norms = self._baselines(signal.loss, norm, limits.spikes)
        scale, skips_known = signal.scale, skipped or signal.scale is not None or signal.skipped is not None
        now = Health(
            healthy_through=healthy_through,
            loss_through=loss_through,
            looked_through=looked_through,
            nan_losses=nan_losses,
            nan_since=nan_since,
            norm_through=norm_through,
            nan_unsettled=nan_unsettled,
            skips=self.skips + 1 if skipped else 0 if skips_known else self.skips,
            skips_in_all=self.skips_in_all + skipped,
            scaler_settled=self.scaler_settled or (skips_known and not skipped),
            scale=scale if scale is not None else self.scale,
            highest_scale=self.highest_scale if scale is None else max(self.highest_scale, scale),
            losses=losses,
            norms=norms,
        )
        cause, reason, in_a_row = now._judge(signal, limits, skipped=skipped)
        if cause is None:
            return now, Diagnosis(step=signal.step)
        return now, now._diagnosis(signal, cause, reason, in_a_row)

    def wants_look(self, signal: Signal) -> bool:
        """True if the signal cannot be judged without reading the weights and buffers."""
        return not signal.looked and _shows_harm(signal)

    def _was_skipped(self, signal: Signal) -> bool:
        if signal.skipped is not None:
            return signal.skipped
        if signal.error is not None and cause_of_error(signal.error) == "loss_scale":
            return True
        if signal.scale is None:
            return False
        fell = self.scale is not None and signal.scale < self.scale
        return fell or (signal.grad_norm is not None and not _FINITE(signal.grad_norm))

    def _clean_through(self, signal: Signal) -> tuple[int, int, int]:
        """Return `healthy_through`, `loss_through` and `looked_through`."""
        step, healthy, by_loss, looked = signal.step, self.healthy_through, self.loss_through, self.looked_through
        if signal.loss and _FINITE(signal.loss):  # it was computed from the weights before this update
            healthy, by_loss = max(healthy, step - 1), max(by_loss, step)
        if signal.looked and signal.bad_tensor is None:
            healthy, looked = max(healthy, step), max(looked, step)
        return healthy, by_loss, looked

    def _row_of_nan(self, signal: Signal) -> tuple[int, int | None]:
        """Return `nan_losses` and `nan_since`."""
        if signal.loss is None:
            return self.nan_losses, self.nan_since
        if _FINITE(signal.loss):
            return 0, None
        return self.nan_losses + 1, self.nan_since if self.nan_since is not None else signal.step

    def _unsettled(self, signal: Signal, norm: float | None) -> tuple[int | None, int | None]:
        """Return `norm_through` and `nan_unsettled`."""
        if norm is not None:
            return signal.step, None
        unsettled = self.nan_unsettled
        if signal.loss is None:
            unsettled = None if signal.looked and signal.bad_tensor is None else unsettled
        elif unsettled is None and not _FINITE(signal.loss):
            unsettled = signal.step
        return self.norm_through, unsettled

    def _baselines(self, loss: float | None, norm: float | None, spikes: Spikes | None) -> tuple[Baseline, Baseline]:
        """Return `losses` and `norms`, which are kept only where spikes count."""
        losses, norms = self.losses, self.norms
        if spikes is not None and loss is not None and _FINITE(loss):
            losses = losses.after(loss, spikes)
        if spikes is not None and norm is not None:
            norms = norms.after(norm, spikes)
        return losses, norms

    def _judge(self, signal: Signal, limits: Limits, *, skipped: bool) -> tuple[str | None, str, int]:
        """Return the cause, the reason, and how many updates in a row show it."""
        norm, scale = signal.grad_norm, signal.scale
        if signal.bad_tensor is not None:
            return "weights", f"{signal.bad_tensor} is not finite after step {signal.step}", 0
        if signal.error is not None and (cause := cause_of_error(signal.error)) is not None:
            said = signal.error.strip().partition("\n")[0][:200]
            return cause, f"step {signal.step} raised: {said}", self.skips if cause == "loss_scale" else 0
        if scale is not None and (scale <= 0.0 or not _FINITE(scale)):
            return "loss_scale", f"the loss scale is {scale:g}", self.skips
        if skipped:
            tolerated = limits.scale_skips * (1 if self.scaler_settled else _SEARCHING)
            by = "loss_scale" if scale is not None else "skipped"
            if self.skips >= tolerated:
                who = "the loss scaler" if scale is not None else "the optimizer"
                return by, f"{who} skipped {self.skips} updates in a row", self.skips
            if scale is not None and scale <= limits.scale_floor and scale < self.highest_scale:
                return by, f"the loss scale fell to its floor ({scale:g}) and updates are still skipped", self.skips
            return None, "", 0
        if norm is not None and not _FINITE(norm):
            shown = " (and the loss shows exactly 0)" if signal.loss == 0.0 else ""
            return "grad_norm", f"the gradient norm of step {signal.step} is {norm}{shown}", 0
        if self.nan_losses >= limits.nan_losses and signal.loss is not None:
            return "nan_loss", f"the loss was not finite {self.nan_losses} times in a row", self.nan_losses
        if limits.spikes is not None:
            for name, value, baseline in (("gradient norm", norm, self.norms), ("loss", signal.loss, self.losses)):
                if value is not None and baseline.spikes >= limits.spikes.in_a_row:
                    far = f"{baseline.spikes} times in a row (last {value:g}, median {baseline.median:g})"
                    # The previous update made the weights that this loss was computed from.
                    return "spike", f"the {name} was far above normal {far}", baseline.spikes + (name == "loss")
        return None, "", 0

    def _diagnosis(self, signal: Signal, cause: str, reason: str, in_a_row: int) -> Diagnosis:
        onset = signal.step - in_a_row + 1 if in_a_row else min(self.healthy_through + 1, signal.step)
        onset_through = None
        # Accumulated gradients may have held NaN since then, which neither a read nor another loss shows.
        waited = self.nan_unsettled if self.nan_unsettled is not None else signal.step
        if signal.bad_tensor is not None and self.nan_since is None and not _shows_harm(signal):
            # A finite loss shows nothing about tensors that it does not depend on: only the last read does.
            first = min(self.looked_through + 1, waited, onset)
            if first < onset:
                onset, onset_through = first, onset
                reason = f"{reason}, and every tensor was finite after step {first - 1}"
        elif cause == "grad_norm" and waited < onset:
            onset = waited
            reason = f"{reason}, and the loss was not finite at step {waited}"
        elif cause == "grad_norm" and self.norm_through is not None and self.norm_through + 1 < onset:
            onset, onset_through = self.norm_through + 1, onset
        elif not in_a_row and _shows_harm(signal):
            # The update before may have left harmed weights. But its own loss was finite, so it shows no sign.
            sign = min(self.nan_since or signal.step, self.loss_through + 1)
            onset_through = sign if onset < sign else None
        unsure = onset_through is not None
        evidence = {
            "loss": signal.loss,
            "grad_norm": signal.grad_norm,
            "loss_scale": signal.scale,
            "tensor": signal.bad_tensor,
            "in_a_row": in_a_row or None,
            "skipped_updates": self.skips_in_all or None,
            "healthy_through": self.healthy_through,
            "looked_through": self.looked_through if unsure else None,
            "norm_through": self.norm_through if cause == "grad_norm" and unsure else None,
        }
        # If weights are not finite after a row of NaN losses, they already were when the row began.
        through = self.nan_since if cause == "weights" else None
        return Diagnosis(
            step=signal.step,
            cause=cause,
            onset_step=max(onset, 1),
            onset_through=onset_through,
            suspect_through=None if through is None or through < onset else through,
            reason=reason,
            evidence={name: value for name, value in evidence.items() if value is not None},
        )


def overdue(step: int, last_saved: int | None, *, save_every: int, most: int) -> str | None:
    """Return a sentence if more than `most` saves in a row are missing, else None."""
    since = last_saved or 0
    if step - since <= most * save_every:
        return None
    return f"no state was saved since step {since}: a rollback would lose {step - since} updates"


def _shows_harm(signal: Signal) -> bool:
    """True if healthy weights cannot give this loss."""
    loss, norm = signal.loss, signal.grad_norm
    # The Hugging Face Trainer reports a NaN loss as exactly 0. Its forward pass overflowed, which poisons running
    # statistics even if the scaler skips the update.
    hidden = loss == 0.0 and norm is not None and not _FINITE(norm)
    return loss is not None and (hidden or not _FINITE(loss))


def cause_of_error(text: str) -> str | None:
    """Return the sickness that an exception's text reports, or None."""
    return next((cause for cause, pattern in _CAUSES if pattern.search(text[:_LONGEST_ERROR])), None)


def _middle(values: Sequence[float]) -> float:
    """Return the upper median, ten times faster than `statistics.median`: training waits for it."""
    return sorted(values)[len(values) // 2]
