"""Batches that did harm stay left out, also after a crash that comes before the next save.

A save holds what was left out up to then. Until there is one, the incident's record holds it: a resume takes up again
what the incidents of the same training recorded. Whatever in a record is not as we write it is left alone: then the
batches are met again, as if nothing had been recorded, and that is an incident of its own.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ckptguard.errors import CkptguardError
from ckptguard.records.incidents import Incident, newest_incidents
from ckptguard.records.run import Run
from ckptguard.runs.history import load_history
from ckptguard.training.ranks import Ranks
from ckptguard.training.state.data_position import Draw
from ckptguard.values.ids import parse_id
from ckptguard.values.incident import Skipped

MOST_UPDATES = 10_000  # of one incident
MOST_INCIDENTS = 64
_TOKEN = re.compile(r"[0-9a-f]{32}")
_log = logging.getLogger("ckptguard")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Which batches went into some updates: for each rank (update, epoch, number in the epoch). `training` names the
    training whose data is counted so."""

    training: str
    by_rank: Sequence[Sequence[Sequence[int]]]


def skipped_of(first: int, last: int, drawn: Drawn | None) -> Skipped | None:
    """What a record says of leaving out the updates from `first` to `last`; None where there are too many of them."""
    if last - first >= MOST_UPDATES:
        return None
    runs: list[tuple[int, int, int, int]] = []
    for rank, triples in enumerate(drawn.by_rank if drawn is not None else ()):
        for epoch, index in sorted((e, i) for update, e, i in triples if first <= update <= last):
            if runs and runs[-1][:2] == (rank, epoch) and runs[-1][3] == index - 1:
                runs[-1] = (*runs[-1][:3], index)
            else:
                runs.append((rank, epoch, index, index))
    plain = Skipped(first=first, last=last, training=drawn.training if drawn is not None else "", draws=tuple(runs))
    return msgspec.structs.replace(plain, check=_check(plain))


def leave_out_again(run: Run, ranks: Ranks, extra: dict[str, Any]) -> None:
    """Add to the data's position in `extra`, which was saved beside the checkpoint that was just loaded, what the
    incidents of the same training left out; called by all ranks. Raises nothing about records."""
    told = ranks.tell(_draws_of(run, extra, ranks.size) if ranks.rank == 0 else None)
    data = extra.get("data")
    if not told or not isinstance(data, dict):
        return
    before = {tuple(draw) for draw in data["skipped"]}
    data["skipped"] = sorted(before | {tuple(draw) for draw in told[ranks.rank]})
    if len(data["skipped"]) > len(before):
        _log.warning("left out again, for they did harm before: %d batches", len(data["skipped"]) - len(before))


def updates_left_out(run: Run, series: str, *, after: int) -> list[int]:
    """The updates after `after` that incidents left out on the way on which the series is now: since the checkpoint
    that each went back to, nobody but a later one of them began that step anew. Raises nothing about records."""
    found: set[int] = set()
    try:
        history = load_history(run)
        earliest: int | None = None  # that a later incident went back to
        for incident, skipped in reversed(list(_of_ours(run))):
            step, generation = parse_id(incident.known_good or "") or (None, 0)
            if step is None or skipped.draws or skipped.training or step >= skipped.first:
                continue
            newest = history.generations(series, step)[-1:] == [generation]
            if (newest and step <= after) or (earliest is not None and earliest < step):
                earliest = step if earliest is None else min(earliest, step)
                found |= set(range(max(after + 1, skipped.first), skipped.last + 1))
    except CkptguardError as error:
        _told(error)
        return []
    return sorted(found)


def _draws_of(run: Run, extra: dict[str, Any], size: int) -> list[list[Draw]] | None:
    """What incidents of the training that saved `extra` left out, by rank; None where there is nothing."""
    training = (extra.get("guard") or {}).get("training")
    if not isinstance(training, str) or not _TOKEN.fullmatch(training):
        return None
    try:
        ours = [skipped for _, skipped in _of_ours(run) if skipped.training == training]
    except CkptguardError as error:
        _told(error)
        return None
    found: list[set[Draw]] = [set() for _ in range(size)]
    for skipped in ours:
        if {rank for rank, *_ in skipped.draws} <= set(range(size)):
            for rank, epoch, first, last in skipped.draws:
                found[rank] |= {(epoch, index) for index in range(first, last + 1)}
    return [sorted(draws) for draws in found] if any(found) else None


def _of_ours(run: Run) -> Iterator[tuple[Incident, Skipped]]:
    """What guards of this run recorded that they left out, oldest first; nothing that could not be theirs."""
    for incident in newest_incidents(run, MOST_INCIDENTS):
        skipped = incident.known_details().skipped
        if skipped is None or incident.source != "guard" or incident.step is None:
            continue
        if _is_sound(skipped, incident.step):
            yield incident, skipped
        else:
            _log.warning("what incident %s left out cannot be read, and is not left out again", incident.id)


def _is_sound(skipped: Skipped, noticed: int) -> bool:
    if not 1 <= skipped.first <= skipped.last <= noticed or skipped.last - skipped.first >= MOST_UPDATES:
        return False
    drawn: dict[int, int] = {}
    for rank, epoch, first, last in skipped.draws:
        if min(rank, epoch, first) < 0 or not first <= last < first + MOST_UPDATES:
            return False
        drawn[rank] = drawn.get(rank, 0) + last - first + 1
    most = skipped.last - skipped.first + 1
    return all(count <= most for count in drawn.values()) and skipped.check == _check(skipped)


def _check(skipped: Skipped) -> str:
    """A record has no checksum of its own; a flipped digit must not leave out other batches."""
    text = msgspec.json.encode(msgspec.structs.replace(skipped, check=""))
    return f"{zlib.crc32(text):08x}"


def _told(error: CkptguardError) -> None:
    _log.warning("what incidents left out could not be read, and is not left out again: %s", error.message)
