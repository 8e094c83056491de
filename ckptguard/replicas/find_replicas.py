"""Replicas as further places of the same checkpoints, for when the run's own are not enough."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec

from ckptguard.decisions.known_good import choose_known_good
from ckptguard.errors import CouldNotTellError, NotFoundError
from ckptguard.records.lineage import refuse_another
from ckptguard.records.run import Run
from ckptguard.replicas.replicate import Replica, open_replica, replica_urls, standing, wanted_in_replica
from ckptguard.runs.find_known_good import (
    REPLICA,
    Candidate,
    KnownGood,
    find_known_good,
    known_good_candidates,
    none_found,
)
from ckptguard.runs.history import History, Key, load_history
from ckptguard.runs.sealed_content import is_good
from ckptguard.storage.retries import Retries
from ckptguard.values.settings import Settings

_log = logging.getLogger("ckptguard")


def open_replicas(run: Run, settings: Settings) -> Iterator[Run]:
    """The replicas that can be read, local ones first. Of the others, and of places that hold another training, a
    warning tells, after a few seconds."""
    for url in replica_urls(run.url, settings):
        try:
            replica = _open_own(run, url)
            replica.storage.stat("")
        except (CouldNotTellError, NotFoundError) as error:
            _log.warning("the replica %s cannot be used: %s", url, error.message)
            continue
        yield replica


def replica_standings(run: Run, settings: Settings) -> tuple[Replica, ...]:
    """Where each replica stands, as it is now."""
    urls = replica_urls(run.url, settings)
    wanted = wanted_in_replica(run, settings) if urls else []
    found = []
    for url in urls:
        try:
            behind, last = standing(_open_own(run, url), wanted)
            found.append(Replica(url=url, behind=behind, last_good=last))
        except CouldNotTellError as error:
            found.append(Replica(url=url, behind=None, last_good=None, trouble=error.message))
    return tuple(found)


def _open_own(run: Run, url: str) -> Run:
    """The replica; CouldNotTellError if what lies there is no replica of this training."""
    replica = open_replica(run, url, retries=Retries(attempts=2, total=5.0))
    refuse_another(run, replica)
    return replica


def replica_candidates(
    replica: Run, history: History, *, before_step: int | None = None, series: str | None = None
) -> list[Candidate]:
    """The known-good checkpoints of a replica, best first, without those that the run's own `history` knows to be sick
    or bad."""
    found = known_good_candidates(replica, load_history(replica), before_step=before_step, series=series)
    return [c for c in found if not known_bad(history, c.answer.series, c.key)]


def known_bad(history: History, series: str, key: Key) -> bool:
    """Whether a run has a verdict on this content, and not a good one."""
    return key in history.standings(series) and not is_good(history, series, key)


def has_newest(
    history: History, series: str, key: Key, *, before_step: int | None = None, only: str | None = None
) -> bool:
    """Whether no newer checkpoint than this one is on record as good (of one series, if `only` names it)."""
    names = history.names if only is None else {only: history.names.get(only, [])}
    for name, one in choose_known_good(names, before_step=before_step):
        other = (one.step, one.generation)
        if (series, key) == (name, other):
            return True
        if is_good(history, name, other):
            return False
    return False


def find_known_good_anywhere(
    run: Run, settings: Settings, *, before_step: int | None = None, series: str | None = None
) -> KnownGood:
    """The newest known-good checkpoint, in its nearest place: in the run, as a kept copy, in a replica. Replicas are
    asked only if the run has lost what is on record as good. NoKnownGoodError if there is none anywhere."""
    if not settings.replicas:
        return find_known_good(run, before_step=before_step, series=series)
    history = load_history(run)
    own = known_good_candidates(run, history, before_step=before_step, series=series, most=1)
    best = own[0] if own else None
    if best is not None and has_newest(history, best.answer.series, best.key, before_step=before_step, only=series):
        return best.answer
    for replica in open_replicas(run, settings):
        try:
            found = replica_candidates(replica, history, before_step=before_step, series=series)
        except CouldNotTellError as error:
            _log.warning("the replica %s cannot be used: %s", replica.url, error.message)
            continue
        if found and (best is None or order_of(found[0]) > order_of(best)):
            best = as_replica(found[0], replica)
    if best is None:
        raise none_found(run, before_step)
    return best.answer


def as_replica(candidate: Candidate, replica: Run) -> Candidate:
    """A candidate whose answer says that it lies in a replica."""
    answer = msgspec.structs.replace(
        candidate.answer,
        place=REPLICA,
        reason=f"verified {candidate.answer.verified_at}; the run has no copy of it, this is the replica {replica.url}",
    )
    return msgspec.structs.replace(candidate, answer=answer)


def order_of(candidate: Candidate) -> tuple[int, int]:
    """By this candidates are older and newer."""
    return (candidate.key[0] or 0, candidate.key[1])
