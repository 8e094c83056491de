"""Check that a checkpoint's name gives the same order as its counters, such as ``iter_num`` in nanoGPT's ckpt.pt."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ckptguard.checks.evidence import Evidence
from ckptguard.decisions.known_good import COUNTERS
from ckptguard.layouts import Checkpoint
from ckptguard.layouts.step_names import counter_in_name
from ckptguard.scan.result import Scan
from ckptguard.values.ids import MAX_STEP
from ckptguard.values.manifest import Counter, Manifest
from ckptguard.values.verdict import Finding, Severity

_OPTIMIZER_STEP = re.compile(r"(?:^|\.)state\.[^.]+\.step$")
_WHAT_TO_SET = (
    "The name decides which checkpoint is newest. Save under rising names (a date with the year first), or say which"
    " number is the step by [[patterns]] in ckptguard.toml"
)
_SETTINGS = re.compile(
    r"(?:^|\.)(?:\w*args|\w*config|cfg|\w*params|\w*parameters|\w*settings|options?)\.", re.IGNORECASE
)


def check_order(evidence: Evidence) -> Iterator[Finding]:
    """Warn if a name and the counters inside order a checkpoint differently against a neighbour.

    Its numbers may not be steps, or training restarted. Without counters, several numbers in a name are compared with
    the save times.
    """
    for other, place, sign in ((evidence.previous, "after", 1), (evidence.following, "before", -1)):
        if other is None:
            continue
        own, there = _finest_in_common(evidence, other)
        if own is not None and (own.value - there) * sign >= 0:
            continue
        if own is not None:
            but = f"its {own.kind} is {own.value}, and {there} in that one"
        elif place == "before" and evidence.sealed is None and _was_saved_later(evidence, other):
            but = "it was saved later"
        else:
            continue
        message = f"its name puts it {place} {other.path}, but {but}. {_WHAT_TO_SET}"
        yield Finding("order", Severity.WARNING, message, tensor=own.source if own is not None else None)


def _was_saved_later(evidence: Evidence, other: Manifest) -> bool:
    """True if all of its files were written after those of a checkpoint that was sealed before it."""
    mine = [e.mtime_ns for e in evidence.checkpoint.entries]
    before = [f.mtime_ns for f in other.files]
    several = isinstance(evidence.checkpoint.step, tuple)
    return several and None not in (*mine, *before) and min(n or 0 for n in mine) > max(n or 0 for n in before)


def began_anew(evidence: Evidence, earlier: Manifest) -> bool:
    """True if a counter inside is lower than in an earlier save: training restarted."""
    own, there = _finest_in_common(evidence, earlier)
    return own is not None and own.value < there


def _finest_in_common(evidence: Evidence, other: Manifest) -> tuple[Counter | None, int]:
    """Return the finest counter that both checkpoints have, and its value in the other one."""
    there = {counter.kind: counter.value for counter in other.counters if counter.kind in COUNTERS}
    own = next((c for c in counters_of(evidence.checkpoint, evidence.scan) if c.kind in there), None)
    return own, there[own.kind] if own is not None else 0


def counters_of(checkpoint: Checkpoint, scan: Scan) -> tuple[Counter, ...]:
    """Return the counters of a checkpoint, the finest first, one of each kind.

    The outermost key counts, and of equally deep ones the highest. Values set by the user (``args.step``) do not count.
    """
    best: dict[str, tuple[tuple[int, int], Counter]] = {}
    for kind, value, file, name in _found(checkpoint, scan):
        if not math.isfinite(value) or value != int(value) or not 0 <= value <= MAX_STEP:
            continue
        depth = 0 if kind == "optimizer step" else name.count(".")
        counter = Counter(kind, int(value), f"{file}: {name}")
        if kind not in best or best[kind][0] < (-depth, counter.value):
            best[kind] = ((-depth, counter.value), counter)
    return tuple(best[kind][1] for kind in COUNTERS if kind in best)


def named_counters(path: str) -> tuple[Counter, ...]:
    """Return the counter that the name of a checkpoint states, if any."""
    named = counter_in_name(path.rpartition("/")[2])
    return () if named is None else (Counter(*named, source=path),)


def _found(checkpoint: Checkpoint, scan: Scan) -> Iterator[tuple[str, float, str, str]]:
    """Yield (kind, value, file, key) of everything that may be a counter."""
    for file in scan.files:
        inside = checkpoint.inside(file.entry.key)
        for leaf in file.structure.leaves:
            kind = _kind_of(leaf.name)
            if kind is not None and type(leaf.value) is not bool and not leaf.of_array:
                yield kind, leaf.value, inside, leaf.name
        for tensor, numbers in zip(file.structure.tensors, file.numbers, strict=True):
            # A single number in a tensor: its largest magnitude is the number, and no counter is negative.
            if numbers is not None and numbers.count == 1 and not numbers.nan:
                kind = _kind_of(tensor.name)
                if kind is not None:
                    yield kind, numbers.largest, inside, tensor.name


def _kind_of(name: str) -> str | None:
    if _OPTIMIZER_STEP.search(name):
        return "optimizer step"
    last = name.rpartition(":")[2].rpartition(".")[2]
    return last if last in COUNTERS and not _SETTINGS.search(name) else None
