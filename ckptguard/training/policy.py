"""What to do about a sickness: how far back, whether to skip batches, when to give up. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptguard.errors import SettingsError

REPLAYED_CAUSES = ("crash", "damage", "asked")


@dataclass(frozen=True, kw_only=True)
class RollbackPolicy:
    """When and how training goes back.

    Numeric causes skip the offending batches, for an exact replay repeats a deterministic overflow; a crash, damage
    or a request replays. A second incident within `near` save intervals of the last one goes one GOOD checkpoint
    further back and multiplies the learning rate by `lr_factor`. After `budget` rollbacks of one guard the next
    incident raises RollbackExhausted. `nan_losses` and `scale_skips` are how many in a row count as sick.
    """

    budget: int = 3
    near: int = 2
    lr_factor: float = 0.5
    skip: bool = True
    nan_losses: int = 5
    scale_skips: int = 5

    def __post_init__(self) -> None:
        if self.budget < 0 or self.near < 0:
            raise SettingsError("budget and near of a RollbackPolicy cannot be negative")
        if not 0 < self.lr_factor <= 1:
            raise SettingsError(
                f"lr_factor of a RollbackPolicy must be more than 0 and at most 1, not {self.lr_factor}"
            )
        if self.nan_losses < 1 or self.scale_skips < 1:
            raise SettingsError("nan_losses and scale_skips of a RollbackPolicy must be at least 1")


@dataclass(frozen=True, kw_only=True)
class PastRollback:
    """One rollback that was made: when the sickness began, and to which step training went back."""

    onset_step: int
    target_step: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do. Training goes back to the newest known-good before `before_step`; with `further` to the one
    before that, if there is one."""

    give_up: bool
    before_step: int
    further: bool = False
    skip: bool
    lr_factor: float
    reason: str


def decide(
    policy: RollbackPolicy, past: Sequence[PastRollback], *, cause: str, onset_step: int, save_every: int
) -> Decision:
    """The decision about one incident, given the rollbacks that this guard has made so far."""
    skip = policy.skip and cause not in REPLAYED_CAUSES
    how = "skipping the batches in question" if skip else "replaying every batch"
    if len(past) >= policy.budget:
        return Decision(
            give_up=True,
            before_step=onset_step,
            skip=skip,
            lr_factor=1.0,
            reason=f"the budget of {policy.budget} rollbacks is spent",
        )
    last = past[-1] if past else None
    if last is not None and cause != "asked" and abs(onset_step - last.onset_step) <= policy.near * save_every:
        return Decision(
            give_up=False,
            before_step=onset_step,
            further=True,
            skip=skip,
            lr_factor=policy.lr_factor,
            reason=(
                f"again within {policy.near} save intervals: one checkpoint further back, "
                f"learning rate x {policy.lr_factor:g}, {how}"
            ),
        )
    return Decision(give_up=False, before_step=onset_step, skip=skip, lr_factor=1.0, reason=how)
