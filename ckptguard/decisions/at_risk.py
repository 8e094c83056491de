"""How much computing time would be lost if a training died now, and how much rollbacks have saved."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from ckptguard.values.run_summary import RunSummary

# A file of each rank: torch.distributed.checkpoint's, the random states of the Trainer and Accelerate, and ZeRO's.
_OF_RANK = (
    re.compile(r"__(\d{1,6})(?:_\d+\.distcp|\.metadata)"),
    re.compile(r"(?:rng_state|random_states)_(\d{1,6})\.(?:pth|pkl)"),
    re.compile(r"\w*?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt"),
)
_ANY_RANK = re.compile(r"(?<![a-z])rank[_-]?(\d{1,6})(?!\d)")  # it need not be all of them
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


def rank_named(path: str) -> tuple[int | None, str]:
    """Return the rank that wrote a file, by its name, and the kind of file that each rank has: that name without the
    rank. For a name without a rank, all numbers are left out."""
    folder, slash, name = path.rpartition("/")
    matches = (*(form.fullmatch(name) for form in _OF_RANK), _ANY_RANK.search(name))
    match = next(filter(None, matches), None)
    if match is None:
        return None, re.sub(r"\d+", "#", path)
    start, end = match.span(1)
    return int(match[1]), f"{folder}{slash}{name[:start]}#{name[end:]}"


def ranks_named(paths: Iterable[str]) -> int | None:
    """Return how many ranks have files of their own among the files of a checkpoint. None if no name tells."""
    names = [path.rpartition("/")[2] for path in paths]
    found = [{match.groups() for name in names if (match := form.fullmatch(name))} for form in _OF_RANK]
    return max(map(len, found)) or None
