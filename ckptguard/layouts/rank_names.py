"""Names of the files that each rank writes for itself."""

from __future__ import annotations

import re
from collections.abc import Iterable

# A file of each rank: torch.distributed.checkpoint's, the random states of the Trainer and Accelerate, and ZeRO's.
_OF_RANK = (
    re.compile(r"__(\d{1,6})(?:_\d+\.distcp|\.metadata)"),
    re.compile(r"(?:rng_state|random_states)_(\d{1,6})\.(?:pth|pkl)"),
    re.compile(r"\w*?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt"),
)
_ANY_RANK = re.compile(r"(?<![a-z])rank[_-]?(\d{1,6})(?!\d)")  # it need not be all of them


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
