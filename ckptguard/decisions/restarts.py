"""Decide from which checkpoint a training starts, and whether a supervised command is started again. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ckptguard.decisions.known_good import COUNTERS, NAMED, OPTIMIZER_STEP
from ckptguard.values.ids import CheckpointId

FIRST_MOMENTS = 10.0  # seconds within which a command fails if it can never work
GAVE_UP = "gave up"  # the last action on an incident starts with this when a guard's own budget is spent
_USAGE = frozenset((2, 126, 127))  # wrong usage; cannot be executed; cannot be found


class NextAction(enum.Enum):
    """What to do after a command ended."""

    END = "end"  # nothing: its exit code is ours
    RESTART = "restart"  # roll back to known-good, and restart the command
    GO_BACK = "go back"  # roll back to known-good, and end: the command succeeded, but its saves are sick
    SPENT = "spent"  # a restart is needed, but the budget is spent


class CommandEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one start of a command ended. `status` is its exit code, or 128 + n after signal n.

    - `asked`: we were asked to end, and forwarded the signal.
    - `stopped`: we stopped the command because its saves were sick.
    - `sick`: its newest save is sick.
    - `saved`: it saved something. `good_since`: a good save followed the previous start's end.
    - `died_before`: the previous start of the command died, too.
    - `gave_up`: a guard inside the command spent its own rollback budget.
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
    """Return the next action, and why, as words that follow "the command". At most `most` restarts are allowed."""
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
    """Return the counter by which a first save after a restart belongs to a training that began from scratch, else
    None.

    It did if it is nearer to the beginning than to the step that it should have continued from. Optimizer steps count
    only if there is no other counter: an optimizer may start from scratch inside an epoch.
    """
    kinds = [kind for kind in (*COUNTERS, *NAMED) if kind in saved and kind in went_back_to]
    kind = next((kind for kind in kinds if kind != OPTIMIZER_STEP), next(iter(kinds), None))
    return kind if kind is not None and saved[kind] < went_back_to[kind] >= 2 * saved[kind] else None


def describe(status: int) -> str:
    """Say how a command ended."""
    return f"was killed by signal {status - 128}" if status > 128 else f"ended with exit code {status}"


class StartPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that a training may start from, or did.

    `newer` is how many saves of its series after it had ever been good by then. `content` is a digest of its bytes.
    """

    id: CheckpointId
    newer: int
    training_step: int | None = None
    content: str = ""

    def is_same(self, other: StartPoint) -> bool:
        """True if a training that starts from either continues from the same place: a name may be saved again, and a
        step under two names."""
        same_step = self.training_step is not None and self.training_step == other.training_step
        return self.id == other.id or same_step or (self.content != "" and self.content == other.content)


class StartChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint to start from, None if none is left, and how many starts from it count. `spent` were passed over:
    from each of them training was started too often."""

    point: StartPoint | None
    before: int = 0
    spent: tuple[StartPoint, ...] = ()


def choose_start(
    points: Iterable[StartPoint], starts: Sequence[StartPoint], newer: Mapping[CheckpointId, int], *, most: float
) -> StartChoice:
    """Return the first of the good checkpoints, best first, that training was started from fewer than `most` times.

    A start counts until a newer good save of its series follows. `newer` has the number of those now, for each start.
    """
    counted = [start for start in starts if counts_still(start, newer)]
    spent: list[StartPoint] = []
    for point in points:
        before = sum(point.is_same(start) for start in counted)
        if before < most:
            return StartChoice(point=point, before=before, spent=tuple(spent))
        spent.append(point)
    return StartChoice(point=None, spent=tuple(spent))


def counts_still(start: StartPoint, newer: Mapping[CheckpointId, int]) -> bool:
    """True if no newer good save followed a start."""
    return newer.get(start.id, 0) <= start.newer
