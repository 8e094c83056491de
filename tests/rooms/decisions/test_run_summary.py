"""The summary of a run, from rows that are made up: what each view of it shows."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ckptguard.decisions.run_summary import in_state, last_read, summarize
from ckptguard.values.ids import CheckpointId
from ckptguard.values.run_rows import Generation, RunPlaces, WaitingSave
from ckptguard.values.run_summary import RunSummary


def row(step: int, outcome: str, *, at: float | None = -1.0, in_place: bool = True, **known: object) -> Generation:
    """A save that was made every ten seconds."""
    at = 10.0 * step if at == -1.0 else at
    name = f"model-#/{step:012d}.{known.pop('generation', 1)}"
    good = outcome == "good"
    return Generation(name=name, outcome=outcome, good=good, saved_at=at, in_place=in_place, **known)  # type: ignore[arg-type]


def of(*rows: Generation, known_good: int | None = None, **there: object) -> RunSummary:
    """The summary of a run with these rows."""
    good = None if known_good is None else CheckpointId("model-#", known_good, 1)
    places = RunPlaces(**{"url": "/runs/a", **there})  # type: ignore[arg-type]
    return summarize(places, {one.id: one for one in rows}, (), good)


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (row(3, "incomplete"), "incomplete"),
        (row(3, "bad"), "bad"),
        (row(3, "incomplete", at=None, in_place=False), "good"),  # it was removed, and left no manifest
        (row(3, "incomplete", at=5.0), "good"),  # it is older than the newest
        (row(3, "bad", in_place=False, aside="quarantine"), "good"),  # a rollback moved it aside
        (row(3, "suspect", in_place=False), "good"),  # a rollback found only its copy
    ],
)
def test_the_newest_save_is_the_one_that_training_would_resume_from(last: Generation, told: str) -> None:
    """Its outcome is the run's newest, as long as it is there and nothing follows it."""
    summary = of(row(1, "good"), row(2, "good"), last, known_good=2)
    assert (summary.newest_outcome, summary.newest_at) == (told, 20.0 if told == "good" else 30.0)


def test_a_save_that_waits_is_the_newest() -> None:
    """Nobody knows yet what it is."""
    summary = of(row(1, "bad"), waiting=(WaitingSave("model-#", 5, 20.0, 21.0),))
    assert (summary.newest_outcome, summary.newest_at, summary.backlog) == ("pending", 20.0, 1)


def test_without_a_save_in_place_the_last_one_counts() -> None:
    """Unless a rollback moved it aside. Damage to files that are gone says nothing of what they held."""
    gone = replace(row(2, "good", in_place=False), outcome="bad")
    assert of(row(1, "good", in_place=False), gone).newest_outcome == "good"
    assert of(row(1, "good", in_place=False), row(2, "bad", in_place=False, aside="quarantine")).newest_at == 10.0


def test_a_run_that_went_back_does_not_train_until_it_saves_again() -> None:
    """Neither do the files that the rollback put back count as a save."""
    before = [row(step, "good", content=str(step)) for step in (1, 2, 3)]
    assert in_state(of(*before), now=31.0).training
    back = replace(before[2], in_place=False, aside="quarantine", outcome="suspect", good=False)
    put_back = row(2, "good", at=40.0, content="2", generation=2)
    summary = in_state(of(*before[:2], back, put_back, known_good=2), now=41.0)
    assert (summary.training, summary.known_good_at, summary.newest_at) == (False, 20.0, 20.0)
    assert in_state(of(*before[:2], back, put_back, row(4, "good", at=50.0)), now=51.0).training


def test_saves_that_nobody_watches_are_not_protected() -> None:
    """Whatever was protected before: the next rotation may take what was never read."""
    waits = (WaitingSave("model-#", 5, 20.0, 21.0),)
    kept = row(1, "good", kept="copy")
    assert of(kept, known_good=1, waiting=waits).protected
    alone = of(kept, known_good=1, waiting=waits, watched=False)
    assert not alone.protected
    assert alone.explanation.startswith("no: 1 save waits for a verdict, and nothing watches this run")


@pytest.mark.parametrize(
    ("state", "protected", "explanation"),
    [
        ({}, True, "yes: model-1 is known good and has a full copy"),
        ({"state": "failing", "trouble": "no route"}, False, "unknown: no route"),
        ({"state": "ended", "ended": "ended: it was removed"}, False, "ended: it was removed"),
    ],
)
def test_what_cannot_be_seen_is_not_called_protected(state: dict[str, str], protected: bool, explanation: str) -> None:
    """What was true when it was seen last may be no longer."""
    seen = of(row(1, "good", path="model-1", kept="copy"), known_good=1)
    now = in_state(seen, 11.0, **state)
    assert (now.protected, now.explanation) == (protected, explanation)
    unseen = in_state(RunSummary(url="/runs/a", name="a"), 11.0, "waiting", "no such folder")
    assert (unseen.protected, unseen.explanation.partition(":")[0]) == (False, "unknown")


@pytest.mark.parametrize(("behind", "told"), [(0, 0), (1, 1), (None, 2)])
def test_a_replica_that_cannot_be_asked_has_nothing_for_certain(behind: int | None, told: int) -> None:
    """All good checkpoints count as missing there, so that somebody is told."""
    found = of(row(1, "good"), row(2, "good"), row(3, "bad"), known_good=2, replicas=2, behind=behind)
    assert found.replicas_behind == told


@pytest.mark.parametrize(
    ("judged", "whole", "made", "good", "told"),
    [
        (5.0, None, None, True, 5.0),
        (5.0, 9.0, None, True, 9.0),
        (5.0, None, 7.0, True, 7.0),
        (5.0, 3.0, None, True, 3.0),
        (5.0, 3.0, None, False, 5.0),
        (None, None, None, True, None),
    ],
)
def test_a_place_was_read_by_a_scrub_or_its_copy_or_its_verdict(
    judged: float | None, whole: float | None, made: float | None, good: bool, told: float | None
) -> None:
    """A verdict that is not good came from a reading of its own."""
    assert last_read(judged, whole, made, good=good) == told
