"""How much computing time would be lost if a training died now, and how much rollbacks have saved."""

from __future__ import annotations

import msgspec

from ckptguard.values.run_summary import RunSummary

_LITTLE = 360.0  # seconds: less than a tenth of an hour is not told


class AtRisk(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-seconds that would have to be computed again. `since`: when the checkpoint was saved that would remain, or
    the first save on record if none would. Without a known `world_size` one GPU is assumed."""

    gpu_seconds: float
    since: float
    world_size: int | None
    remains: bool  # False: no good checkpoint is safe


def is_stale(facts: RunSummary, now: float) -> bool:
    """True if a run trains, and its known-good checkpoint is older than three of its own save intervals."""
    if facts.known_good_at is None or facts.save_interval is None or not facts.training:
        return False
    return now - facts.known_good_at > 3 * facts.save_interval


def at_risk(facts: RunSummary, now: float) -> AtRisk | None:
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


def at_risk_words(lost: AtRisk | None) -> str | None:
    """Say what would be lost, in GPU-hours. None: little or nothing."""
    if lost is None or lost.gpu_seconds < _LITTLE:
        return None
    since = "the newest safe checkpoint" if lost.remains else "the first save, for no good checkpoint is safe"
    if lost.world_size is None:
        return f"{lost.gpu_seconds / 3600:.1f} hours since {since}, on each of its GPUs"
    return f"{lost.gpu_seconds / 3600:.1f} GPU-hours since {since}, on {lost.world_size} GPUs"
