"""Keep a run below its `keep_bytes`: what thinning can spare is not pruned."""

from __future__ import annotations

import msgspec

from ckptguard.decisions.budget import WillThin
from ckptguard.retention.prune import Pruned, prune
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work
from ckptguard.upkeep.thin import thin, thin_too
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy


def deeper(policy: Policy) -> Policy:
    """Return the policy that thins all but what must stay whole, as a run does that is over its budget."""
    return msgspec.structs.replace(policy, thin_after=policy.keep_good)


def thinnable(view: RunView, policy: Policy, refused: dict[CheckpointId, str] | None = None) -> WillThin:
    """Return what thinning would take, oldest first; nothing without a budget. `refused` is as for `thin`. Raises
    CouldNotTellError as `prune` does."""
    if policy.keep_bytes is None:
        return {}
    found, _ = thin(view, deeper(policy), dry_run=True, refused=refused)
    return {one.path: {file: one.anew.get(file) for file in one.files} for one in found if one.files}


def prune_and_thin(view: RunView, policy: Policy, *, grace: float, dry_run: bool = False, work: Work = PLAIN) -> Pruned:
    """Do as `prune`, then thin what the policy says, and then, oldest first, what its budget needs."""
    pruned = prune(view, policy, grace=grace, dry_run=dry_run, will_thin=thinnable(view, policy))
    done = thin_too(view, pruned, work=work)
    wanted = set(done.budget.to_thin if done.budget is not None else ()) - {one.path for one in done.thinned}
    if done.could_not_tell or not wanted:
        return done
    left = len(wanted)

    def may_begin(size: int) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and work.may_begin(size)

    limited = msgspec.structs.replace(work, may_begin=may_begin)
    found, troubles = thin(view, deeper(policy), dry_run=dry_run, work=limited)
    more = tuple(one for one in found if one.path in wanted)
    return msgspec.structs.replace(done, thinned=(*done.thinned, *more), could_not_tell=troubles)
