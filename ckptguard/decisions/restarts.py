"""Is a supervised command started again after it ended? A decision, from what is known about its end."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from ckptguard.decisions.known_good import COUNTERS, NAMED, OPTIMIZER_STEP

FIRST_MOMENTS = 10.0  # seconds in which a command fails that was never going to work
GAVE_UP = "gave up"  # how the last action on an incident begins when a guard's own budget is spent
_USAGE = frozenset((2, 126, 127))  # wrong usage; cannot be executed; cannot be found


class NextAction(enum.Enum):
    """What follows the end of a command."""

    END = "end"  # nothing more to do: its exit code is ours
    RESTART = "restart"  # go back to known-good, and start it again
    GO_BACK = "go back"  # go back to known-good, and end: its saves are sick, although it says that all is well
    SPENT = "spent"  # it would be started again, but the budget is spent


class CommandEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one start of a command ended. `status` is its exit code, 128 + n after signal n.

    `asked`: we were told to end, and passed it on. `stopped`: we stopped it, because its saves are sick. `sick`: its
    newest save is sick. `saved` and `good`: whether it saved anything, and anything that is good. `died_before`: its
    previous start ended by dying too, and `good_since` says whether there was a good save since then. `gave_up`: a
    guard inside of it went back as often as it may, in vain.
    """

    status: int
    asked: bool = False
    stopped: bool = False
    sick: bool = False
    saved: bool = False
    good_since: bool = False
    gave_up: bool = False
    died_before: bool = False
    is_first: bool = False
    seconds: float = 0.0


def decide(ended: CommandEnd, *, restarts: int, most: int) -> tuple[NextAction, str]:
    """What follows, and why, in words that follow "the command". `restarts` were made so far, of at most `most`."""
    if ended.asked:
        return NextAction.END, "was asked to end"
    if not ended.stopped and ended.status == 0:
        if not ended.sick:
            return NextAction.END, "ended well"
        return NextAction.GO_BACK if most else NextAction.SPENT, "ended with exit code 0, but its newest save is sick"
    if ended.gave_up and not ended.stopped:
        why = f"{describe(ended.status)}, and the guard inside of it {GAVE_UP}"
        return (NextAction.GO_BACK if ended.sick and most else NextAction.END), why
    why = "has sick saves" if ended.sick else describe(ended.status)
    if not ended.sick:
        if not ended.saved and ended.status in _USAGE:
            return NextAction.END, f"{why}: it cannot be run like this"
        if ended.is_first and not ended.saved and ended.status < 128 and ended.seconds < FIRST_MOMENTS:
            return NextAction.END, f"{why} at once, without a save: starting it again would change nothing"
        if ended.died_before and not ended.good_since:
            return NextAction.END, f"{why}, for the second time without a new good save"
    return (NextAction.RESTART if restarts < most else NextAction.SPENT), why


def is_far_before(saved: Mapping[str, int], went_back_to: Mapping[str, int]) -> str | None:
    """Whether a first save after a restart is of a training that began from scratch: by counters, the kind that tells;
    None if it is not. Nearer to the beginning than to where it should have gone on from is far. An optimizer that
    begins anew while an epoch goes on is no new training, so its steps count only where nothing else does."""
    kinds = [kind for kind in (*COUNTERS, *NAMED) if kind in saved and kind in went_back_to]
    kind = next((kind for kind in kinds if kind != OPTIMIZER_STEP), next(iter(kinds), None))
    return kind if kind is not None and saved[kind] < went_back_to[kind] >= 2 * saved[kind] else None


def describe(status: int) -> str:
    """How a command ended, in words."""
    return f"was killed by signal {status - 128}" if status > 128 else f"ended with exit code {status}"
