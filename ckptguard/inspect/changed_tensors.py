"""Changed tensors: what set the first bad checkpoint apart from the last good one, as a short table for a report."""

from __future__ import annotations

from collections.abc import Mapping

from ckptguard.errors import CkptguardError
from ckptguard.inspect.diff import TensorChange, diff_sources
from ckptguard.inspect.tensor_table import TensorSource
from ckptguard.runs.work import PLAIN, Work
from ckptguard.values.incident import ChangedTensor, worded

MOST_SICK = 10  # of those that became non-finite, so that there is room for those that merely changed
MOST_CHANGES = 20


def changed_tensors(
    good: TensorSource, bad: TensorSource, largest: Mapping[str, float], *, work: Work = PLAIN
) -> tuple[tuple[ChangedTensor, ...], int, str | None]:
    """(What became non-finite, then what changed most; how many more; why they could not be compared, or not wholly).

    `largest` are the largest finite magnitudes of the good one's tensors by name. Raises nothing about the bytes.
    """
    try:
        found = diff_sources(good, bad, work=work)
    except CkptguardError as error:
        return (), 0, f"the two cannot be compared: {error.message}"
    sick = [c for c in found.changes if c.difference is not None and c.difference.became_nonfinite]
    rest = [c for c in found.changes if c.difference is None or not c.difference.became_nonfinite]
    kept = sick[:MOST_SICK]
    kept += rest[: MOST_CHANGES - len(kept)]
    damaged = next(iter(found.damaged), None)
    note = f"{damaged.file} is damaged, so this may not be all" if damaged is not None else None
    return tuple(_changed(c, largest) for c in kept), len(found.changes) - len(kept), note


def _changed(change: TensorChange, largest: Mapping[str, float]) -> ChangedTensor:
    found, before, after = change.difference, change.a, change.b
    side = after if after is not None else before
    return ChangedTensor(
        name=change.name,
        role=change.role,
        change=change.change,
        dtype=side.dtype if side is not None else None,
        elements=found.count if found is not None else None,
        became_nonfinite=found.became_nonfinite if found is not None else 0,
        first_nonfinite=found.first_nonfinite if found is not None else None,
        relative_l2=worded(found.relative_l2) if found is not None else None,
        largest_change=worded(found.largest_change) if found is not None else None,
        largest=largest.get(before.name) if before is not None and change.role == "model" else None,
        note=change.note,
    )
