"""How long a run was sick until somebody decided: went back, or closed the incident otherwise. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ckptguard.values.run_rows import Generation, IncidentRow
from ckptguard.values.verdict import Outcome

_SICK = (Outcome.BAD.value, Outcome.SUSPECT.value)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision: the incident that it closed, whether it was a "rollback" or "other", and how many seconds passed
    since the trouble began."""

    incident: str
    decision: str
    seconds: float


def new_decisions(
    before: Mapping[str, IncidentRow], after: Sequence[IncidentRow], saves: Iterable[Generation]
) -> list[Decision]:
    """Return the decisions that were not known before, each once: one rollback may close several incidents.

    A trouble of the numbers begins with the write of its first sick save since the decision before, any other one
    with its incident.
    """
    sick = [
        (row.id.number, row.saved_at)
        for row in saves
        if row.outcome in _SICK and row.saved_at is not None and row.id.number is not None
    ]
    found: dict[str, tuple[str, float, float]] = {}
    for row in after:
        known = before.get(row.name)
        if row.decided_at is None or row.at is None or (known is not None and known.decided_at is not None):
            continue
        if row.went_back is not None and any(_is_of_same_rollback(row, other) for other in before.values()):
            continue
        since = max((r.decided_at for r in after if r.decided_at is not None and r.decided_at < row.at), default=0.0)
        begins = [at for number, at in sick if _explains(row, number) and since < at < row.decided_at]
        began, key = min([row.at, *begins]), row.went_back or row.name
        _, earliest, decided = found.get(key, (row.name, began, row.decided_at))
        found[key] = row.name, min(began, earliest), max(row.decided_at, decided)
    how = {row.name: "other" if row.went_back is None else "rollback" for row in after}
    return [
        Decision(incident=name, decision=how[name], seconds=max(0.0, decided - began))
        for name, began, decided in found.values()
    ]


def _is_of_same_rollback(row: IncidentRow, other: IncidentRow) -> bool:
    """True if another incident was closed by the rollback that closed this one: it went there while this was open."""
    is_same = other.decided_at is not None and other.went_back == row.went_back
    return is_same and row.at is not None and row.at <= (other.decided_at or 0.0)


def _explains(row: IncidentRow, number: int) -> bool:
    if row.cause != "numeric" or row.step is None:
        return False
    return (row.step if row.onset is None else row.onset) <= number <= row.step
