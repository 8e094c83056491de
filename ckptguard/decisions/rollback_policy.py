"""Decide about a sickness in a guarded training: how far to roll back, whether to skip batches, when to give up. Pure.

What is known-good is not decided here, but in `runs/find_known_good.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptguard.decisions.health import Spikes
from ckptguard.errors import SettingsError

REPLAYED_CAUSES = ("crash", "damage", "asked")
GoodBefore = Callable[[int], int | None]  # the newest known-good step before a step, if there is one


@dataclass(frozen=True, kw_only=True)
class RollbackPolicy:
    """When and how training rolls back.

    After a numeric cause, training skips the suspect batches: replaying them exactly would repeat a deterministic
    overflow. After a crash, damage or a request, training replays them. `skip=False` always replays.

    `first="replay"` makes the same updates again before any batch is skipped, and compares their losses and norms bit
    for bit. That tells data and numerics from a machine. Only if training turns sick again are the batches skipped.
    `first="skip"` skips at once. By default training replays first where it resumes exactly, and deterministic
    algorithms are on or an earlier replay of the run was equal.

    A second incident within `near` save intervals of the last one rolls back one GOOD checkpoint further. It also
    multiplies the learning rate by `lr_factor`. After `lr_back` updates without an incident the rate comes back (None:
    it stays). A third incident rolls back two further, and so on. After `budget` rollbacks of one guard, the next
    incident raises RollbackExhausted.

    Weights, buffers and optimizer state are read every `check_every` updates, and before every save. If only such a
    read finds harm, every update since the last clean read is suspect. The first rollback then skips only the updates
    that the losses do not clear. A repeat skips all of them.

    - `nan_losses`, `scale_skips`: how many in a row count as sick.
    - `spikes=Spikes()`: finite losses and norms far above normal count as sick, too.
    - `margin`: roll back at least this many updates before the onset.
    - `proven`: prefer a checkpoint that this many healthy updates followed.
    - `reset_scale`: the loss scale after it collapsed (None: as it was saved).
    - `unsaved`: this many save intervals without a good save are an incident.
    """

    budget: int = 3
    near: int = 2
    lr_factor: float = 0.5
    lr_back: int | None = 1000
    skip: bool = True
    first: str | None = None
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
        if self.first not in (None, "replay", "skip"):
            raise SettingsError(f'first {ours} must be "replay" or "skip", not {self.first!r:.80}')
        if not 0 < self.lr_factor <= 1:
            raise SettingsError(f"lr_factor {ours} must be more than 0 and at most 1, not {self.lr_factor}")
        if (
            min(
                self.check_every,
                self.nan_losses,
                self.scale_skips,
                self.unsaved,
                1 if self.lr_back is None else self.lr_back,
            )
            < 1
        ):
            raise SettingsError(f"check_every, nan_losses, scale_skips, unsaved and lr_back {ours} must be at least 1")
        if self.reset_scale is not None and not 0 < self.reset_scale < float("inf"):
            raise SettingsError(f"reset_scale {ours} must be a positive number, not {self.reset_scale}")


@dataclass(frozen=True, kw_only=True)
class RateCut:
    """By which factor the learning rate is cut, and the last update that an incident suspected since. `left` are the
    rates that this process left: if they are others now, something else set them, and the cut ends."""

    factor: float = 1.0
    since: int = 0
    left: tuple[object, ...] | None = None

    def after(self, decision: RollbackDecision, *, last: int) -> RateCut:
        """Return the cut after one more rollback, about an incident whose last suspect update is `last`."""
        return RateCut(factor=self.factor * decision.lr_factor, since=last)

    def is_over(self, policy: RollbackPolicy, step: int) -> bool:
        """True if the learning rate comes back after this update."""
        return self.factor != 1.0 and policy.lr_back is not None and step - self.since >= policy.lr_back


def policy_of(given: RollbackPolicy | None) -> RollbackPolicy:
    """The policy that a caller means: the default one for None. SettingsError for what is none."""
    if given is None:
        return RollbackPolicy()
    if not isinstance(given, RollbackPolicy):
        hint = "such as policy=ckptguard.RollbackPolicy(budget=5)"
        raise SettingsError(f"policy must be a RollbackPolicy, not {given!r:.80}", hint=hint)
    return given


@dataclass(frozen=True, kw_only=True)
class RollbackDecision:
    """What to do. `choose_target` picks the known-good checkpoint.

    It lies before `before_step`, if possible before `prefer_before`, and `further` checkpoints further back.
    `onset_step` is the first suspect update, and with `skip` the first skipped one. With `replay` the same updates are
    made again to see why, with the same learning rate and loss scale.
    """

    give_up: bool
    onset_step: int
    before_step: int
    prefer_before: int
    further: int = 0
    skip: bool
    replay: bool = False
    lr_factor: float = 1.0
    reset_scale: float | None = None
    reason: str


def decide(
    policy: RollbackPolicy,
    past: Sequence[int],
    *,
    cause: str,
    onset_step: int,
    save_every: int,
    possibly_since: int | None = None,
    last: int | None = None,
    replays: bool = False,
) -> RollbackDecision:
    """Decide about one incident, given the onsets of those after which this guard went back so far.

    `onset_step` is the last update that can be the onset. `possibly_since` is the first one, if that differs. `last` is
    the last update whose batch may be harmful. `replays`: whether training can replay before anything is skipped.
    """
    skip = policy.skip and cause not in REPLAYED_CAUSES
    give_up = len(past) >= policy.budget
    asked = cause == "asked"
    repeats = 0 if asked else _repeats(past, onset_step, policy.near * save_every)
    if repeats and possibly_since is not None and possibly_since < onset_step:
        onset_step = possibly_since
    how = f"skipping {_batches(onset_step, last)}" if skip else "replaying every batch"
    reason = how
    replay = skip and replays and not give_up
    if replay:
        reason = "making the same updates again, to see whether they turn sick again"
    elif repeats:
        far = "one checkpoint" if repeats == 1 else f"{repeats} checkpoints"
        stays = "" if policy.lr_back is None else f" until {policy.lr_back} updates are healthy"
        rate = f"learning rate x {policy.lr_factor:g}{stays}"
        reason = f"again within {policy.near} save intervals: {far} further back, {rate}, {how}"
    if give_up:
        reason = f"the budget of {policy.budget} rollbacks is spent"
    return RollbackDecision(
        give_up=give_up,
        onset_step=onset_step,
        before_step=onset_step if asked else max(onset_step - policy.margin, 1),
        prefer_before=onset_step if asked else onset_step - max(policy.proven, policy.margin),
        further=0 if replay else repeats,
        skip=skip and not replay,
        replay=replay,
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
    """Return the step to go back to, or None if none is before the onset. Preferences are dropped if nothing meets
    them."""
    limits = (decision.prefer_before, decision.before_step, onset_step)
    targets = (further_back(good_before, limit, decision.further) for limit in limits)
    return next((target for target in targets if target is not None), None)


def before_repeat(good_before: GoodBefore, limit: int, *, last: int | None) -> int:
    """Return the step before which to roll back when training is sick again, usually `limit`.

    If that leads to `last` again, where the sickness came back, go one checkpoint further, if there is an older one.
    """
    newest, further = (further_back(good_before, limit, count) for count in (0, 1))
    return newest if newest is not None and newest == last and further != newest else limit


def further_back(good_before: GoodBefore, limit: int, further: int) -> int | None:
    """Return the newest known-good step before a limit, then go up to `further` checkpoints further back. None: there
    is none."""
    target = None
    for _ in range(further + 1):
        step = good_before(limit)
        if step is None:
            break
        target = limit = step
    return target


def _repeats(past: Sequence[int], onset_step: int, near: int) -> int:
    """Count the latest rollbacks that were each near the next one."""
    count = 0
    for earlier in reversed(past):
        if abs(onset_step - earlier) > near:
            break
        count, onset_step = count + 1, earlier
    return count
