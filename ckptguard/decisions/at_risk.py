"""How much computing time would be lost if a training died now, and how much rollbacks have saved."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ckptguard.values.run_facts import RunFacts

WEEK = 7 * 86400.0


class AtRisk(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-seconds that would have to be computed again. `since`: when the checkpoint was saved that would remain, or
    the first save on record if none would. Without a known `world_size` one GPU is assumed."""

    gpu_seconds: float
    since: float
    world_size: int | None
    remains: bool  # False: no good checkpoint is safe


def is_stale(facts: RunFacts, now: float) -> bool:
    """True if a run trains, and its known-good checkpoint is older than three of its own save intervals."""
    if facts.known_good_at is None or facts.save_interval is None or not facts.training:
        return False
    return now - facts.known_good_at > 3 * facts.save_interval


def at_risk(facts: RunFacts, now: float) -> AtRisk | None:
    """Return what would be lost now; None if the run does not train, or nothing of it is on record."""
    since = facts.safe_at if facts.safe_at is not None else facts.began_at
    if not facts.training or since is None:
        return None
    return AtRisk(
        gpu_seconds=(facts.world_size or 1) * max(now - since, 0.0),
        since=since,
        world_size=facts.world_size,
        remains=facts.safe_at is not None,
    )


def most_at_risk(saves: Iterable[tuple[float, bool]], interval: float, world_size: int | None, now: float) -> float:
    """Return the most GPU-seconds that were at risk at any moment of the week before `now`.

    `saves`: when each was made, the oldest first, and whether it was good and safe. Training counts as paused from
    three intervals after a save until the next one.
    """
    most, lost, before = 0.0, 0.0, None
    for at, safe in (*saves, (now, False)):
        if at > now:
            continue  # a clock was wrong
        if before is not None:
            lost += min(max(at - before, 0.0), 3 * interval)
            most = max(most, lost) if at > now - WEEK else most
        lost, before = 0.0 if safe else lost, at
    return (world_size or 1) * most
