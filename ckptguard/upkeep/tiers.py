"""Bring a replica up to date, and keep to the rule of its place there."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from ckptguard.errors import BusyError, CouldNotTellError
from ckptguard.records.trash import list_trashed
from ckptguard.replicas.replicate import (
    Replica,
    open_replica,
    replica_places,
    replicate,
    thinned_in_run,
    what_rule_removes,
)
from ckptguard.retention.prune import Pruned, prune
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work
from ckptguard.upkeep.thin import thin
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import parse_span
from ckptguard.values.settings import ReplicaPlace


def update_replica(
    view: RunView,
    url: str,
    *,
    dry_run: bool = False,
    work: Work = PLAIN,
    hold: Callable[[], None] | None = None,
    arrived: set[CheckpointId] | None = None,
    only: Collection[CheckpointId] | None = None,
) -> Replica:
    """Send to a replica as `replicate` does. If all has arrived, remove and thin there what the rule of its place says.

    The newest good one stays there in any case, and what is removed goes to the trash of the replica.
    """
    done = replicate(view, url, dry_run=dry_run, work=work, hold=hold, arrived=arrived, only=only)
    place = replica_places(view.run.url, view.settings).get(done.url)
    if place is None or done.trouble is not None or done.yielded or (done.behind != 0 and not dry_run):
        return done
    try:
        pruned = _keep_to_rule(view, done.url, place, work, dry_run=dry_run)
    except (BusyError, CouldNotTellError) as error:
        return msgspec.structs.replace(done, trouble=f"nothing was pruned there: {error.message}")
    trouble = "; ".join(pruned.could_not_tell) if pruned is not None else ""
    return msgspec.structs.replace(done, pruned=pruned, trouble=trouble or None)


def _keep_to_rule(view: RunView, url: str, place: ReplicaPlace, work: Work, *, dry_run: bool) -> Pruned | None:
    policy = place.policy()
    may_thin = view.settings.replica_thin if place.thin is None else place.thin
    if not policy.has_rules and not may_thin:
        return None
    target = open_replica(view, url)
    thins = thinned_in_run(view, target) if may_thin else frozenset()
    removes = what_rule_removes(view, target, policy)  # by names, so that a place where nothing is to do costs little
    if not removes and not thins and not list_trashed(target.run):
        return None
    done = prune(target, policy, grace=parse_span(view.settings.trash_grace), dry_run=dry_run)
    if dry_run:
        done = _with_what_comes(done, removes)
    if not thins or done.could_not_tell:
        return done
    of_old = msgspec.structs.replace(policy, thin_after=1)
    thinned, troubles = thin(target, of_old, dry_run=dry_run, work=work, only=lambda one: one.path in thins)
    return msgspec.structs.replace(done, thinned=thinned, could_not_tell=troubles)


def _with_what_comes(planned: Pruned, removes: Collection[str]) -> Pruned:
    """Return a plan as it is once all has arrived that is to be sent."""
    removed = tuple(one for one in planned.decisions if not one.keep or one.checkpoint.path in removes)
    return msgspec.structs.replace(planned, removed=removed)
