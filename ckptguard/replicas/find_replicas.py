"""Replicas as further places of the same checkpoints, for when the run's own are not enough."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec

from ckptguard.errors import CouldNotTellError, NotFoundError
from ckptguard.records.lineage import refuse_another
from ckptguard.replicas.replicate import Replica, open_replica, replica_urls, standing, wanted_in_replica
from ckptguard.runs.find_known_good import (
    ANY,
    REPLICA,
    Candidate,
    KnownGood,
    Wanted,
    find_known_good,
    known_good_candidates,
    newest_candidate,
    none_found,
    ranked_candidates,
)
from ckptguard.runs.history import History
from ckptguard.runs.run_view import RunView
from ckptguard.runs.sealed_content import is_good
from ckptguard.storage.retries import Retries
from ckptguard.values.ids import CheckpointId

_log = logging.getLogger("ckptguard")


def open_replicas(view: RunView) -> Iterator[RunView]:
    """The replicas that can be read, local ones first. Of the others, and of places that hold another training, a
    warning tells, after a few seconds."""
    for url in replica_urls(view.run.url, view.settings):
        try:
            replica = _open_own(view, url)
            replica.run.storage.stat("")
        except (CouldNotTellError, NotFoundError) as error:
            _log.warning("the replica %s cannot be used: %s", url, error.message)
            continue
        yield replica


def replica_standings(view: RunView) -> tuple[Replica, ...]:
    """Where each replica stands, as it is now."""
    urls = replica_urls(view.run.url, view.settings)
    wanted = wanted_in_replica(view).candidates if urls else ()
    found = []
    for url in urls:
        try:
            behind, last = standing(_open_own(view, url), wanted)
            found.append(Replica(url=url, behind=behind, last_good=last))
        except CouldNotTellError as error:
            found.append(Replica(url=url, behind=None, last_good=None, trouble=error.message))
    return tuple(found)


def _open_own(view: RunView, url: str) -> RunView:
    """The replica; CouldNotTellError if what lies there is no replica of this training."""
    replica = open_replica(view, url, retries=Retries(attempts=2, total=5.0))
    refuse_another(view.run, replica.run)
    return replica


def replica_candidates(replica: RunView, history: History, wanted: Wanted = ANY) -> Iterator[Candidate]:
    """The known-good checkpoints of a replica, best first, without those that the run's own `history` knows to be sick
    or bad. Each is looked for when it is asked for. CouldNotTellError if that of one cannot be told."""
    return (found for found in known_good_candidates(replica, wanted) if not known_bad(history, found.id))


def known_bad(history: History, id: CheckpointId) -> bool:
    """Whether a run has a verdict on this content, and not a good one."""
    return history.has_verdict(id) and not is_good(history, id)


def has_newest(history: History, id: CheckpointId, wanted: Wanted = ANY) -> bool:
    """Whether no newer checkpoint than this one is on record as good, among those that may be taken."""
    for other in ranked_candidates(history, wanted):
        if other == id:
            return True
        if is_good(history, other):
            return False
    return False


def find_known_good_anywhere(view: RunView, wanted: Wanted = ANY) -> KnownGood:
    """The newest known-good checkpoint, in its nearest place: in the run, as a kept copy, in a replica. Replicas are
    asked only if the run has lost what is on record as good. NoKnownGoodError if there is none anywhere."""
    plain = Wanted(before_step=wanted.before_step, series=wanted.series)
    if not view.settings.replicas and wanted == plain:
        return find_known_good(view.run, before_step=wanted.before_step, series=wanted.series)
    best = newest_candidate(view, wanted)
    if best is not None and has_newest(view.history, best.id, wanted):
        return best.answer
    for replica in open_replicas(view):
        try:
            found = next(replica_candidates(replica, view.history, wanted), None)
        except CouldNotTellError as error:
            _log.warning("the replica %s cannot be used: %s", replica.run.url, error.message)
            continue
        if found is not None and (best is None or found.id.order > best.id.order):
            best = as_replica(found, replica)
    if best is None:
        raise none_found(view.run, wanted.before_step)
    return best.answer


def as_replica(candidate: Candidate, replica: RunView) -> Candidate:
    """A candidate whose answer says that it lies in a replica."""
    found = candidate.answer
    reason = f"verified {found.verified_at}; the run has no copy of it, this is the replica {replica.run.url}"
    return msgspec.structs.replace(candidate, answer=msgspec.structs.replace(found, place=REPLICA, reason=reason))
