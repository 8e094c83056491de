"""What the evidence of an incident shows, put so that a rule about its cause can ask for it. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from ckptguard.formats.dtypes import FP16_LIMIT
from ckptguard.values.incident import IncidentReport, Training, number

_HALF = ("float16", "fp16", "half")
_RECENT = 8
_SOON = 100  # updates after a start or a resume


@dataclass(frozen=True)
class CauseEvidence:
    """A report, read as a detective would. What is not known is None, which is neither yes nor no."""

    report: IncidentReport

    @property
    def training(self) -> Training:
        """How training computes, as far as it is known."""
        return self.report.details.training or Training()

    @property
    def framework(self) -> str:
        """The integration that training uses; "" where none is known."""
        noted = self.report.evidence.get("framework")
        known = self.training.framework or (noted if isinstance(noted, str) else None)
        return known or ("trainer" if self.report.source == "callback" else "")

    @property
    def was_looked_at(self) -> bool:
        """Whether the tensors were looked at when it was noticed, so that what is not named was finite."""
        return self.report.details.training is not None or bool(self.report.details.tensors)

    @property
    def weights_in_fp16(self) -> bool:
        """Whether trained parameters themselves are fp16; seen from outside, whether they are saved so."""
        if self.training.dtypes:
            return self.training.dtypes.get("float16", 0) > 0
        good = self.report.details.last_good
        return good is not None and any(m.dtype == "float16" for m in good.largest)

    @property
    def fp16(self) -> bool | None:
        """Whether something is computed in fp16."""
        known = self.training
        stated = {str(self.report.evidence.get(name)) for name in ("autocast", "dtype")}
        if self.weights_in_fp16 or (known.autocast or "") in _HALF or stated & set(_HALF) or self.scales:
            return True
        good = self.report.details.last_good
        scaled = known.loss_scaler or ("saved" if good is not None and "scaler" in good.holds else None)
        if scaled not in (None, "none"):
            return True
        return False if known.dtypes and known.autocast is not None else None

    @property
    def scales(self) -> list[float]:
        """The loss scales, oldest first."""
        return self._finite("scale")

    @property
    def falls(self) -> int:
        """How often the loss scale fell without ever rising between, up to the end."""
        count = 0
        for later, earlier in zip(reversed(self.scales), reversed(self.scales[:-1]), strict=False):
            if later > earlier:
                break
            count += later < earlier
        return count

    @property
    def loss(self) -> float | None:
        """The loss at the end: what the evidence says, else the last sample."""
        return self._last("loss")

    @property
    def grad_norm(self) -> float | None:
        """The gradient norm at the end."""
        return self._last("grad_norm")

    @property
    def sick(self) -> bool:
        """Whether loss or gradient norm are known not to be finite at the end."""
        return any(value is not None and not math.isfinite(value) for value in (self.loss, self.grad_norm))

    @property
    def norms(self) -> list[float]:
        """The finite gradient norms before the onset, oldest first."""
        return self._finite("grad_norm", before_onset=True)

    @property
    def losses(self) -> list[float]:
        """The finite losses before the onset, oldest first."""
        return self._finite("loss", before_onset=True)

    @property
    def warming_up(self) -> bool:
        """Whether the learning rate was still rising at the onset."""
        rates = self._finite("lr", before_onset=True)
        return len(rates) >= 2 and rates[-1] > 1.001 * rates[max(0, len(rates) - 1 - _RECENT)]

    @property
    def since_start(self) -> int | None:
        """Updates from the start or the resume to the onset, at most."""
        if self.report.onset_last is None:
            return None
        resumed = self.report.details.resumed
        return max(0, self.report.onset_last - (resumed.step if resumed is not None else 0))

    @property
    def soon(self) -> bool:
        """Whether it happened within the first updates after a start or a resume."""
        return self.since_start is not None and self.since_start <= _SOON

    @property
    def headroom(self) -> float | None:
        """The largest weight of the last good checkpoint as a share of what fp16 can hold."""
        good = self.report.details.last_good
        return good.largest[0].largest / FP16_LIMIT if good is not None and good.largest else None

    def kinds(self) -> set[str]:
        """What kinds of tensors were not finite."""
        kinds = {t.kind for t in self.report.details.tensors} - {"file"}
        named = self.report.evidence.get("tensor")
        if not kinds and isinstance(named, str):
            kinds.add("optimizer" if named.startswith("optimizer.") else "weight")
        return kinds

    def spoiled(self) -> bool:
        """Whether weights or optimizer state were not finite."""
        return bool(self.kinds() & {"weight", "optimizer", "tensor"})

    def errors(self, *checks: str) -> list[tuple[str, str]]:
        """What these checks found wrong with the first bad checkpoint."""
        bad = self.report.details.first_bad
        return [(check, said) for check, said in (bad.errors if bad is not None else ()) if check in checks]

    def _last(self, name: str) -> float | None:
        given = self.report.evidence.get(name)
        if isinstance(given, int | float | str) and not isinstance(given, bool):
            return number(given)
        reported = (getattr(sample, name) for sample in reversed(self.report.details.samples))
        return next((value for value in map(number, reported) if value is not None), None)

    def _finite(self, name: str, *, before_onset: bool = False) -> list[float]:
        onset = self.report.onset if before_onset else None
        reported = (getattr(s, name) for s in self.report.details.samples if onset is None or s.step < onset)
        return [value for value in map(number, reported) if value is not None and math.isfinite(value)]


def growth(values: list[float]) -> float | None:
    """How far the largest of the last few stands above the median of those before; None for too short a history."""
    usual, recent = values[:-_RECENT], values[-_RECENT:]
    if len(usual) < _RECENT:
        return None
    middle = statistics.median(usual)
    return max(recent) / middle if middle > 0 else None
