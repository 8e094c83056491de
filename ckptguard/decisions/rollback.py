"""What to do about a sickness: how far back, whether to skip batches, when to give up. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptguard.decisions.health import Spikes
from ckptguard.errors import SettingsError

REPLAYED_CAUSES = ("crash", "damage", "asked")
GoodBefore = Callable[[int], int | None]  # the newest known-good step before a step, if there is one


@dataclass(frozen=True, kw_only=True)
class RollbackPolicy:
    """When and how training goes back.

    Numeric causes skip the offending batches, for an exact replay repeats a deterministic overflow; a crash, damage
    or a request replays. A second incident within `near` save intervals of the last one goes one GOOD checkpoint
    further back and multiplies the learning rate by `lr_factor`; a third goes two further, and so on. Where harm that
    no loss showed was found by a look, every batch since the look before it is in question: they are skipped on such
    a repeat, and at first only what the losses do not vouch for. After `budget` rollbacks of one guard the next
    incident raises RollbackExhausted.

    Weights, buffers and optimizer state are read every `check_every` updates, and before every save.
    `nan_losses` and `scale_skips` are how many in a row count as sick; `spikes=Spikes()` has finite losses and norms
    far above normal count too. Training goes back at least `margin` updates before the onset, and, with `proven`, to
    a checkpoint that so many healthy updates have followed, if there is one. A loss scale that collapsed is raised to
    `reset_scale` (None: left as it was saved). `unsaved` save intervals without a good save are an incident.
    """

    budget: int = 3
    near: int = 2
    lr_factor: float = 0.5
    skip: bool = True
    check_every: int = 50
    nan_losses: int = 5
    scale_skips: int = 5
    spikes: Spikes | None = None
    margin: int = 0
    proven: int = 0
    reset_scale: float | None = 256.0
    unsaved: int = 3

    def __post_init__(self) -> None:
        ours = "of a RollbackPolicy"
        if min(self.budget, self.near, self.margin, self.proven) < 0:
            raise SettingsError(f"budget, near, margin and proven {ours} cannot be negative")
        if not 0 < self.lr_factor <= 1:
            raise SettingsError(f"lr_factor {ours} must be more than 0 and at most 1, not {self.lr_factor}")
        if min(self.check_every, self.nan_losses, self.scale_skips, self.unsaved) < 1:
            raise SettingsError(f"check_every, nan_losses, scale_skips and unsaved {ours} must be at least 1")
        if self.reset_scale is not None and not 0 < self.reset_scale < float("inf"):
            raise SettingsError(f"reset_scale {ours} must be a positive number, not {self.reset_scale}")


def policy_of(given: RollbackPolicy | None) -> RollbackPolicy:
    """The policy that a caller means: the default one for None. SettingsError for what is none."""
    if given is None:
        return RollbackPolicy()
    if not isinstance(given, RollbackPolicy):
        hint = "such as policy=ckptguard.RollbackPolicy(budget=5)"
        raise SettingsError(f"policy must be a RollbackPolicy, not {given!r:.80}", hint=hint)
    return given


@dataclass(frozen=True, kw_only=True)
class PastRollback:
    """One rollback that was made: when the sickness began, and to which step training went back."""

    onset_step: int
    target_step: int


@dataclass(frozen=True, kw_only=True)
class RollbackDecision:
    """What to do. Training goes back to a known-good checkpoint before `before_step`, the newest of those before
    `prefer_before`, and `further` checkpoints further back than that; `choose_target` picks it. `onset_step`: the
    update from which on there is suspicion enough to act upon, and with `skip` the first one that is skipped."""

    give_up: bool
    onset_step: int
    before_step: int
    prefer_before: int
    further: int = 0
    skip: bool
    lr_factor: float = 1.0
    reset_scale: float | None = None
    reason: str


def decide(
    policy: RollbackPolicy,
    past: Sequence[PastRollback],
    *,
    cause: str,
    onset_step: int,
    save_every: int,
    possibly_since: int | None = None,
    last: int | None = None,
) -> RollbackDecision:
    """The decision about one incident, given the rollbacks that this guard has made so far. `onset_step`: by this
    update the harm was done; `possibly_since`: maybe by this earlier one; `last`: by this one at the latest."""
    skip = policy.skip and cause not in REPLAYED_CAUSES
    give_up = len(past) >= policy.budget
    asked = cause == "asked"
    repeats = 0 if asked else _repeats(past, onset_step, policy.near * save_every)
    if repeats and possibly_since is not None and possibly_since < onset_step:
        onset_step = possibly_since
    how = f"skipping {_batches(onset_step, last)}" if skip else "replaying every batch"
    reason = how
    if repeats:
        far = "one checkpoint" if repeats == 1 else f"{repeats} checkpoints"
        rate = f"learning rate x {policy.lr_factor:g}"
        reason = f"again within {policy.near} save intervals: {far} further back, {rate}, {how}"
    if give_up:
        reason = f"the budget of {policy.budget} rollbacks is spent"
    return RollbackDecision(
        give_up=give_up,
        onset_step=onset_step,
        before_step=onset_step if asked else max(onset_step - policy.margin, 1),
        prefer_before=onset_step if asked else onset_step - max(policy.proven, policy.margin),
        further=repeats,
        skip=skip,
        lr_factor=policy.lr_factor if repeats else 1.0,
        reset_scale=policy.reset_scale if cause == "loss_scale" else None,
        reason=reason,
    )


def _batches(first: int, last: int | None) -> str:
    """The batches of these updates, in words."""
    if last is None or last <= first:
        return f"the batch of update {first}"
    return f"the batches of updates {first} to {last}"


def choose_target(decision: RollbackDecision, good_before: GoodBefore, *, onset_step: int) -> int | None:
    """The step to go back to; None if there is none before the onset. What the policy only prefers gives way where
    there is no such checkpoint."""
    limits = (decision.prefer_before, decision.before_step, onset_step)
    targets = (further_back(good_before, limit, decision.further) for limit in limits)
    return next((target for target in targets if target is not None), None)


def before_repeat(good_before: GoodBefore, limit: int, *, last: int | None) -> int:
    """Before which step to go back to, where training is sick again. Usually before `limit`; but where that leads to
    `last` again, from where the sickness came back, one checkpoint further, if there is an older one."""
    newest, further = (further_back(good_before, limit, count) for count in (0, 1))
    return newest if newest is not None and newest == last and further != newest else limit


def further_back(good_before: GoodBefore, limit: int, further: int) -> int | None:
    """The newest known-good step before a limit, and from there `further` checkpoints further back, as far as there
    are older ones. None if there is none at all."""
    target = None
    for _ in range(further + 1):
        step = good_before(limit)
        if step is None:
            break
        target = limit = step
    return target


def _repeats(past: Sequence[PastRollback], onset_step: int, near: int) -> int:
    """How many of the last rollbacks were each near the next one."""
    count = 0
    for earlier in reversed(past):
        if abs(onset_step - earlier.onset_step) > near:
            break
        count, onset_step = count + 1, earlier.onset_step
    return count
