"""Check that training changed something since the step before.

DeepSpeed skips every update on overflow, but keeps counting and saving. Such checkpoints are whole, finite and stale.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from ckptguard.checks.evidence import Evidence
from ckptguard.checks.state import value_of
from ckptguard.formats.dtypes import DTYPES
from ckptguard.values.manifest import BY_PLUGIN, File, Manifest
from ckptguard.values.verdict import Finding, Severity

# Changed by a forward pass alone, so it says nothing about updates.
STATISTICS = re.compile(r"(?:.*[._])?(?:running_(?:mean|var|std)|num_batches_tracked|amax_history)")
_SETTINGS = re.compile(r"(?:.*\.)?(?:step|lr)|(?:.*\.)?param_groups\..*")  # of an optimizer; no moments
_MASTERS = re.compile(r"(?:.*\.)?(?:single_partition_of_)?fp32(?:_flat)?_groups\b.*|(?:.*\.)?fp32_from_fp16.*")


def check_stale(evidence: Evidence) -> Iterator[Finding]:
    """Report that no moment and no weight changed since the previous step: a notice, or a sickness if there is a
    reason.

    A second time in a row is a reason, but only with moments. Weights alone may rest for good reasons, such as a
    learning rate of 0 in warm-up or a frozen module. A loss scale of 0 is an error: no update will ever be made again.
    """
    for file, name, value, _ in _dynamic_scales(evidence):
        if value <= 0:
            message = f"the loss scale is {value:g}: no update can be made any longer"
            yield Finding("stale", Severity.ERROR, message, file, name)
    before = evidence.previous
    if before is None or not unchanged(evidence):
        return
    moments = moments_present(evidence)
    what = "no weight and no optimizer moment" if moments else "no weight"
    message = f"{what} changed since {before.path}{before.id.nth_save}"
    reasons = list(_reasons(evidence))
    if moments and evidence.previous_facts is not None and evidence.previous_facts.stale:
        reasons.append("this is the second time in a row")
    yield Finding("stale", Severity.SICKNESS if reasons else Severity.NOTICE, "; ".join((message, *reasons)))


def moments_present(evidence: Evidence) -> bool:
    """True if the checkpoint holds optimizer moments, besides master weights."""
    return any(is_moment(t.role, t.name, t.dtype) for t in evidence.tensors() if t.span is not None)


def is_moment(role: str, name: str, dtype: str) -> bool:
    """True if a tensor changes with every update, however small: no weight, counter or setting."""
    return role == "optimizer" and is_compared(role, name, dtype) and not _MASTERS.fullmatch(name)


def is_master(role: str, name: str) -> bool:
    """True if a tensor in an optimizer holds weights of full precision."""
    return role == "optimizer" and _MASTERS.fullmatch(name) is not None


def skipped_steps(evidence: Evidence) -> int | None:
    """Return how many updates DeepSpeed has skipped so far."""
    found = (leaf.value for leaf in evidence.leaves() if leaf.name == "skipped_steps")
    return max((n for n in found if type(n) is int and n >= 0), default=None)


def unchanged(evidence: Evidence) -> bool:
    """True if every tensor that updates change has the same bytes in the previous checkpoint, and none is new.

    Only names count, not files: file names state steps, and shards may be split differently.
    """
    before = Counter() if evidence.previous is None else _compared(evidence.previous.files)
    now = Counter(
        (t.role, t.name, file.span_digests[t.span])
        for file in evidence.scan.files
        for t in evidence.tensors_of(file)
        if t.span is not None and is_compared(t.role, t.name, t.dtype)
    )
    return bool(now) and before == now


def has_rested(sealed: Manifest, before: Manifest) -> bool:
    """True if a sealed checkpoint has the moments and weights of the one before: what `Facts.stale` says."""
    here, there = ([f for f in one.files if f.format != BY_PLUGIN] for one in (sealed, before))
    if not any(file.tensors for file in here):
        here, there = list(sealed.files), list(before.files)
    tensors = (t for file in here for t in file.tensors if t.span is not None)
    now = _compared(here)
    return bool(now) and any(is_moment(t.role, t.name, t.dtype) for t in tensors) and now == _compared(there)


def _compared(files: Iterable[File]) -> Counter[tuple[str, str, str]]:
    return Counter(
        (t.role, t.name, f.spans[t.span].blake3)
        for f in files
        for t in f.tensors
        if t.span is not None and is_compared(t.role, t.name, t.dtype)
    )


def is_compared(role: str, name: str, dtype: str) -> bool:
    """True if updates change a tensor: weights, moments and master weights, no statistics and settings."""
    known = DTYPES.get(dtype)
    if known is None or known.float is None:
        return False
    if role == "optimizer":
        return not _SETTINGS.fullmatch(name)
    return role == "model" and not STATISTICS.fullmatch(name)


def _reasons(evidence: Evidence) -> Iterator[str]:
    """Yield the signs that updates were skipped because something is wrong."""
    skipped = skipped_steps(evidence)
    known = evidence.previous_facts.skipped_steps if evidence.previous_facts is not None else None
    if skipped is not None and known is not None and skipped > known:
        yield f"skipped_steps rose from {known} to {skipped}"
    # A dynamic loss scale that cannot fall further, or fell to 1.
    scale = next((value for _, _, value, floor in _dynamic_scales(evidence) if value <= max(floor, 1.0)), None)
    if scale is not None:
        yield f"the loss scale is at its floor ({float(scale):g})"
    for leaf in evidence.leaves():
        if leaf.name == "log_history.-1.grad_norm" and not math.isfinite(leaf.value):
            yield f"the last logged gradient norm is {leaf.value}"
            return


def _dynamic_scales(evidence: Evidence) -> Iterator[tuple[str, str, float, float]]:
    """Yield (file, name, scale, floor) of loss scales that adapt. A static one (bf16 trains with 1) has no floor."""
    for file in evidence.scan.files:
        values = {leaf.name: leaf.value for leaf in file.structure.leaves}
        for tensor in evidence.tensors_of(file):
            if tensor.name.endswith("scale") and tensor.numbers is not None and tensor.numbers.count == 1:
                values[tensor.name] = value_of(tensor.numbers)
        for name, value in values.items():
            prefix, _, tail = name.rpartition(".")
            beside = f"{prefix}." if prefix else ""
            if tail == "cur_scale" and beside + "scale_window" in values:  # DeepSpeed's dynamic scaler
                yield file.entry.key, name, value, values.get(beside + "min_scale", 1.0)
            elif tail == "scale" and not values.keys().isdisjoint(
                (beside + "growth_factor", beside + "backoff_factor")
            ):
                yield file.entry.key, name, value, 1.0
