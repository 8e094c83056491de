"""From the evidence of an incident to its likely causes, in order, with what to do about each. Pure.

Each rule looks at the clues and says what it makes of them, or None. None of them is proof: from 0.6 on a cause is
called likely, below that possible.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptguard.incidents import causes_loading, causes_numeric
from ckptguard.incidents.evidence_queries import Clues
from ckptguard.values.incident import IncidentReport, LikelyCause

RULES: tuple[Callable[[Clues], LikelyCause | None], ...] = (
    causes_numeric.fp16_overflow,
    causes_numeric.gradient_explosion,
    causes_numeric.eps_vanishes,
    causes_numeric.masked_batch,
    causes_numeric.bad_batch,
    causes_loading.damaged_file,
    causes_loading.keys_do_not_match,
    causes_loading.optimizer_not_loaded,
    causes_loading.world_size_differs,
)
_NOTHING_WRONG = ("asked", "crash")
_NOT_SAVED = ("storage", "unsaved")


def likely_causes(report: IncidentReport) -> tuple[LikelyCause, ...]:
    """What may have caused the incident, the likeliest first; never empty, except where nothing was wrong (training
    was asked to go back)."""
    if report.cause in _NOTHING_WRONG:
        return ()
    clues = Clues(report)
    rules = (causes_loading.storage_failed,) if report.cause in _NOT_SAVED else RULES
    found = [cause for rule in rules if (cause := rule(clues)) is not None]
    ordered = sorted(found, key=lambda cause: -cause.weight)
    return tuple(ordered) or (causes_numeric.unknown(clues),)
