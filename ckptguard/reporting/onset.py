"""When harm began, as far as the records show it: one update, or a range of them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from ckptguard.values.incident import Details, IncidentReport, Sample

# Of these the updates in a row were counted: their first one is known.
_COUNTED = ("nan_loss", "loss_scale", "skipped", "spike")
# Nothing began at an update: a file is damaged, or nothing is sick.
_WITHOUT_ONSET = ("damage", "storage", "unsaved", "asked", "anew", "crash")


def has_onset(cause: str) -> bool:
    """Whether incidents of this cause began at some update of training."""
    return cause not in _WITHOUT_ONSET


def with_onset(report: IncidentReport) -> Details:
    """The details with the onset that all of them show: `onset` is the first update at which it can have begun (None:
    not known), and `onset_through` the last one, where that is another."""
    details, first, last = report.details, report.details.onset, report.details.onset_through
    counted = first is not None and report.cause in _COUNTED
    if not has_onset(report.cause) or counted or (first is not None and last is not None):
        return details
    well, sick = last_and_first(details.samples)
    seen = [report.step, overflow_at(report), sick.step if sick is not None else None]
    if first is None:
        bad, good = details.first_bad, details.last_good
        last = min((s for s in (*seen, bad.step if bad is not None else None) if s is not None), default=None)
        before = (well.step if well is not None else None, good.step if good is not None else None)
        since = [step + 1 for step in before if step is not None and last is not None and step < last]
        first = last if last is not None and last == overflow_at(report) else max(since, default=None)
        return msgspec.structs.replace(details, onset=first, onset_through=None if first == last else last)
    last = min((s for s in seen if s is not None and s >= first), default=first)
    if last - first <= 1:
        return details
    if well is not None and first <= well.step < last:
        first = well.step + 1
    return msgspec.structs.replace(details, onset=first, onset_through=None if first == last else last)


def last_and_first(samples: Sequence[Sample]) -> tuple[Sample | None, Sample | None]:
    """The last finite sample before the samples at the end that are not finite, and the first of those."""
    sick = list(itertools.takewhile(_is_sick, reversed(samples)))
    before = samples[: len(samples) - len(sick)]
    return (before[-1] if before else None), (sick[-1] if sick else None)


def overflow_at(report: IncidentReport) -> int | None:
    """The update at which gradients first overflowed, where the one who noticed wrote it down."""
    given = report.evidence.get("first_overflow")
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        return None
    return given if report.step is None or given <= report.step else None


def _is_sick(sample: Sample) -> bool:
    return isinstance(sample.loss, str) or isinstance(sample.grad_norm, str)
