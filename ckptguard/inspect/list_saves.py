"""Which checkpoints of a run are one save, and why: what known-good and a rollback go by."""

from __future__ import annotations

import itertools

import msgspec

from ckptguard.decisions.moments import moments_of
from ckptguard.runs.find_known_good import ANY
from ckptguard.runs.run_view import RunView
from ckptguard.runs.saved_together import RecordedSaves, groups_in
from ckptguard.values.ids import CheckpointId, Step

_MOST = 20  # saves of each group of series


class SavedPart(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint of a save. `rule` joined its series, "" if nothing did. `behind` is how many saves earlier it is
    from."""

    series: str
    step: Step
    id: CheckpointId
    rule: str
    behind: int
    good: bool


class SaveOfSeveral(msgspec.Struct, frozen=True, kw_only=True):
    """One save, with all that belongs to it. `lacks` are series that should be in it, and were not saved."""

    good: bool
    parts: tuple[SavedPart, ...]
    lacks: tuple[str, ...]


def list_saves(view: RunView) -> tuple[SaveOfSeveral, ...]:
    """Return the newest saves of each group of series that are saved together, the newest first."""
    source = RecordedSaves(view.history, ANY, every_copy=True)
    found = []
    for group in groups_in(source, view.history.series):
        for moment in itertools.islice(moments_of(group), _MOST):
            parts = tuple(
                SavedPart(
                    series=member.content.id.series,
                    step=member.content.id.step,
                    id=member.content.id,
                    rule=member.rule,
                    behind=member.behind,
                    good=view.history.is_good(member.content.id),
                )
                for member in moment.members
            )
            found.append(SaveOfSeveral(good=all(part.good for part in parts), parts=parts, lacks=moment.lacks))
    return tuple(found)
