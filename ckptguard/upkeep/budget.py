"""Keep a run below its `keep_bytes`: what thinning can spare is not pruned."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import msgspec

from ckptguard.decisions.budget import WillThin, shares
from ckptguard.errors import BusyError, CouldNotTellError
from ckptguard.retention.prune import Pruned, ThinnedCheckpoint, prune
from ckptguard.retention.space import measure_space
from ckptguard.runs.run_view import RunView
from ckptguard.runs.work import PLAIN, Work
from ckptguard.upkeep.thin import thin, thin_too
from ckptguard.values.ids import CheckpointId
from ckptguard.values.retention_policy import Policy


class SharedBudget:
    """What the runs of a fleet may occupy together. Any thread may call it. A run that was never measured has no share
    yet."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._lock = threading.Lock()
        self._uses: dict[str, int] = {}

    def note(self, run: str, bytes: int | None) -> None:
        """Note what a run occupies, or with None that it is none of the fleet any more."""
        with self._lock:
            self._uses.pop(run, None)
            if bytes is not None:
                self._uses[run] = bytes

    @property
    def left(self) -> int:
        """By how many bytes all of them together may still grow."""
        with self._lock:
            return self.total - sum(self._uses.values())

    def policy_for(self, run: str, policy: Policy) -> Policy:
        """Return the policy with the share of a run, if that is less than its own budget."""
        with self._lock:
            share = shares(self._uses, self.total).get(run, self.total)
        return msgspec.structs.replace(policy, keep_bytes=max(1, min(share, policy.keep_bytes or share)))


def policies_of(views: Sequence[RunView], total: int | None) -> list[Policy]:
    """Return the policy of each run, by its settings and its share of a total (None: no limit). One that cannot be
    measured takes nothing of the others."""
    policies = [view.settings.retention() for view in views]
    if total is None:
        return policies
    shared = SharedBudget(total)
    for view, policy in zip(views, policies, strict=True):
        with contextlib.suppress(BusyError, CouldNotTellError):  # its own pruning says so
            budget = prune(view, msgspec.structs.replace(policy, keep_bytes=total), grace=0.0, dry_run=True).budget
            shared.note(view.run.url, budget.after if budget is not None else None)
    return [shared.policy_for(view.run.url, policy) for view, policy in zip(views, policies, strict=True)]


def deeper(policy: Policy) -> Policy:
    """Return the policy that thins all but what must stay whole, as a run does that is over its budget."""
    return msgspec.structs.replace(policy, thin_after=policy.keep_good)


def thinnable(view: RunView, policy: Policy, refused: dict[CheckpointId, str] | None = None) -> WillThin:
    """Return what thinning would take, oldest first; nothing of a run below its budget, or without one. `refused` is
    as for `thin`. Raises CouldNotTellError as `prune` does."""
    space = None if policy.keep_bytes is None else measure_space(view, ())
    if space is None or policy.keep_bytes is None or space.total(space.sizes) <= policy.keep_bytes:
        return {}  # no manifest is read for that
    found, _ = thin(view, deeper(policy), dry_run=True, refused=refused)
    return {one.path: {file: one.anew.get(file) for file in one.files} for one in found if one.files}


def prune_and_thin(
    view: RunView,
    policy: Policy,
    *,
    grace: float,
    dry_run: bool = False,
    work: Work = PLAIN,
    agree: Callable[[Pruned], None] | None = None,
) -> Pruned:
    """Do as `prune`, then thin what the policy says, and then, oldest first, what its budget needs.

    `agree` is called with the whole plan before anything goes. It may raise. Only what it was asked about goes.
    """
    agreed: set[tuple[str, CheckpointId]] | None = None

    def ask(planned: Pruned) -> None:
        nonlocal agreed
        whole = _then_thin(view, planned)
        agreed = {(one.path, one.id) for one in whole.thinned}
        if agree is not None:
            agree(whole)

    will_thin = thinnable(view, policy)
    done = prune(view, policy, grace=grace, dry_run=dry_run, agree=agree and ask, will_thin=will_thin)
    return _then_thin(view, done, work, lambda one: agreed is None or (one.path, one.id) in agreed)


def _then_thin(
    view: RunView, pruned: Pruned, work: Work = PLAIN, only: Callable[[ThinnedCheckpoint], bool] = lambda _: True
) -> Pruned:
    done = thin_too(view, pruned, work=work, only=only)
    wanted = set(done.budget.to_thin if done.budget is not None else ()) - {one.path for one in done.thinned}
    if done.could_not_tell or not wanted:
        return done
    more, troubles = thin(
        view,
        deeper(done.policy),
        dry_run=done.dry_run,
        work=work,
        only=lambda one: one.path in wanted and only(one),
    )
    return msgspec.structs.replace(done, thinned=(*done.thinned, *more), could_not_tell=troubles)
