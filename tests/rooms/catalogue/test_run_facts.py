"""A run's newest save counts for its facts also when its verdict sealed nothing."""

from __future__ import annotations

import pytest

from ckptguard.catalogue.facts import facts_of
from ckptguard.catalogue.look import RunLook
from ckptguard.catalogue.rows import Generation


def _row(step: int, outcome: str, *, sealed: bool = True, in_place: bool = True, judged_at: float = 0.0) -> Generation:
    """A save that was made every ten seconds; an unsealed one has no time of its own."""
    at = 10.0 * step if sealed else None
    name = f"model-#/{step:012d}.1"
    return Generation(
        name=name, outcome=outcome, good=outcome == "good", saved_at=at, judged_at=judged_at, in_place=in_place
    )


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (_row(3, "incomplete", sealed=False, judged_at=90.0), "incomplete"),
        (_row(3, "bad", sealed=False, judged_at=90.0), "bad"),
        (_row(3, "incomplete", sealed=False, in_place=False, judged_at=90.0), "good"),  # it was removed
        (_row(3, "incomplete", sealed=False, judged_at=5.0), "good"),  # it is older than the newest
        (_row(0, "incomplete", sealed=False, judged_at=90.0), "good"),  # good ones follow it
    ],
)
def test_an_incomplete_newest_save_is_not_called_good(last: Generation, told: str) -> None:
    """Its outcome is the run's newest, as long as it is there and nothing follows it."""
    rows = {row.id: row for row in (_row(1, "good"), _row(2, "good"), last)}
    look = RunLook(url="/runs/a", names=frozenset(), places={})
    facts = facts_of(look, rows, (), next(id for id in rows if id.step == 2))
    assert (facts.newest_outcome, facts.newest_at) == (told, 20.0)


@pytest.mark.parametrize(("behind", "told"), [(0, 0), (1, 1), (None, 2)])
def test_a_replica_that_cannot_be_asked_has_nothing_for_certain(behind: int | None, told: int) -> None:
    """All good checkpoints count as missing there, so that somebody is told."""
    rows = {row.id: row for row in (_row(1, "good"), _row(2, "good"), _row(3, "bad"))}
    look = RunLook(url="/runs/a", names=frozenset(), replicas=2, behind=behind)
    assert facts_of(look, rows, (), next(id for id in rows if id.step == 2)).replicas_behind == told
