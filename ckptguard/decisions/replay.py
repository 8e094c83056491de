"""What a replay shows: updates that were made twice, from the same checkpoint, compared bit for bit. Pure.

The law: a diagnosis never claims more than the bits show. Numbers that are equal up to the onset show that training
repeats itself exactly. Only then does it mean something that training is sick again, or is not. Whatever else is found
is "cannot tell", with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ckptguard.decisions.health import Diagnosis
from ckptguard.values.curve import Row
from ckptguard.values.incident import MOST_REPLAYED, Number, Replay, ReplayedUpdate, worded

DETERMINISTIC, NOT_REPRODUCIBLE, DIFFERS, CANNOT_TELL = "deterministic", "not_reproducible", "differs", "cannot_tell"
EXACT = (DETERMINISTIC, NOT_REPRODUCIBLE)  # outcomes of replays that were equal bit for bit up to the onset
_SIGNALS = ("loss", "gradient norm", "loss scale")
_BEFORE = 40  # of these are before the onset, or before the first difference


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank found. `since`: the first update whose numbers show one that was made again; `equal`: how many were
    equal before the onset and before the first difference. That one is at update `differs`, in `signal`: first `then`,
    then `now`.

    `bad_then`, `bad_now`: the first update since the onset with a number that was not finite. `losses`, `norms`:
    whether every update was compared by them. `gaps` says why the load was not exact.
    """

    since: int | None = None
    equal: int = 0
    differs: int | None = None
    signal: str = ""
    then: Number = None
    now: Number = None
    other_rate: int | None = None
    bad_then: int | None = None
    bad_now: int | None = None
    losses: bool = False
    norms: bool = False
    gaps: tuple[str, ...] = ()
    host: str = ""
    device: str = ""


def compare(then: Iterable[Row], now: Iterable[Row], first: Diagnosis, *, began: int) -> Comparison:
    """Compare the numbers of the updates after `began` up to the one at which `first` was noticed."""
    again = _by_step(now)
    since = differs = other_rate = None
    what: tuple[str, Number, Number] = ("", None, None)
    equal, seen = 0, [set[int](), set[int]()]
    before = {step: rows for step, rows in _by_step(then).items() if began < step <= first.step}
    for step, rows in before.items():
        both = list(zip(rows, again.get(step, ()), strict=False))
        if other_rate is None and any(_differ(a[4], b[4]) for a, b in both):
            other_rate = step
        for place, numbers in enumerate(seen):
            if any(a[place + 1] is not None and b[place + 1] is not None for a, b in both):
                numbers.add(step)
        others = (
            (name, a, b) for one, other in both for name, a, b in zip(_SIGNALS, one[1:4], other[1:4], strict=True)
        )
        other = next((found for found in others if _differ(*found[1:])), None)
        if other is not None:
            differs, what = step, (other[0], worded(other[1]), worded(other[2]))
            break
        if step in seen[1] or (step in seen[0] and step > began + 1):  # the first loss shows no update that was made
            since = step if since is None else since
            equal += step < first.surely_by
    through = set(range(began + 1, (first.step if differs is None else differs) + 1))
    onset = first.onset_step if first.onset_step is not None else first.step
    return Comparison(
        since=since,
        equal=equal,
        differs=differs,
        signal=what[0],
        then=what[1],
        now=what[2],
        other_rate=other_rate,
        bad_then=_first_bad(before, onset, first.step),
        bad_now=_first_bad(again, onset, first.step),
        losses=through <= seen[0],
        norms=through <= seen[1],
    )


def diagnose(first: Diagnosis, again: Diagnosis | None, sides: Sequence[Comparison], *, began: int) -> Replay:
    """Return what the replay of `first` shows, from what each rank found. `again`: how it turned sick once more (None:
    it passed the update at which `first` was noticed, and is healthy)."""
    differs = min((side.differs for side in sides if side.differs is not None), default=None)
    where = next((side for side in sides if side.differs is not None and side.differs == differs), Comparison())
    outcome, reason = _judge(first, again, sides, where)
    rank = _rank(first, sides) if outcome == NOT_REPRODUCIBLE else None
    if outcome == NOT_REPRODUCIBLE and rank is None:
        reason += ". The numbers do not show on which rank"
    side = sides[rank] if rank is not None else Comparison()
    return Replay(
        outcome=outcome,
        reason=reason,
        began=began,
        through=first.step if again is None else min(first.step, again.step),
        equal=max(side.equal for side in sides),
        equal_since=min((side.since for side in sides if side.since is not None), default=None),
        differs=differs,
        signal=where.signal or None,
        then=where.then,
        now=where.now,
        rank=rank,
        host=side.host or None,
        device=side.device or None,
    )


def _judge(
    first: Diagnosis, again: Diagnosis | None, sides: Sequence[Comparison], where: Comparison
) -> tuple[str, str]:
    """Return the outcome and the reason. The order of the questions is the law."""
    onset, sign = min(first.onset_step or first.step, first.surely_by), first.surely_by
    gap = next((gap for side in sides for gap in side.gaps), None)
    rate = min((side.other_rate for side in sides if side.other_rate is not None), default=None)
    differs, since = where.differs, min((side.since for side in sides if side.since is not None), default=None)
    if gap is not None:
        return CANNOT_TELL, f"the resume was not exact: {gap}"
    if rate is not None and (differs is None or rate <= differs):
        return CANNOT_TELL, f"update {rate} was made with another learning rate than the first time"
    if differs is not None and differs < onset:
        return DIFFERS, _changed(where)
    if since is None or since >= min(sign, sign if differs is None else differs):
        return CANNOT_TELL, "no update before the onset could be compared"
    if differs is not None and differs < sign and again is not None:
        return DIFFERS, _changed(where)
    equal = f"bit for bit equal from update {since} up to the onset"
    if again is not None:
        return _sick_again(first, again, sides, where, equal)
    if any(side.bad_now is not None for side in sides):
        bad = min(side.bad_now for side in sides if side.bad_now is not None)
        return CANNOT_TELL, f"{equal}, and update {bad} was not finite again, but training did not count as sick"
    if differs is None and first.cause != "weights":
        return CANNOT_TELL, f"{equal}, and later too, but training did not count as sick again"
    return NOT_REPRODUCIBLE, f"{equal}, and healthy now: a machine or a race; the batch was innocent and is kept"


def _changed(where: Comparison) -> str:
    numbers = f"{where.signal} {where.then}, then {where.now}"
    return f"training is not deterministic, or a number changed unseen, from update {where.differs} on ({numbers})"


def _sick_again(
    first: Diagnosis, again: Diagnosis, sides: Sequence[Comparison], where: Comparison, equal: str
) -> tuple[str, str]:
    narrowed = is_one_of_two(first) and (again.step, again.cause) == (first.onset_step, "weights")
    if (again.step, again.cause) != (first.step, first.cause) and not narrowed:
        return CANNOT_TELL, f"{equal}, but sick in another way: {again.reason}"
    if where.differs is not None and not (isinstance(where.then, str) and isinstance(where.now, str)):
        return CANNOT_TELL, f"{equal}, and sick again, but with another {where.signal} at update {where.differs}"
    bad = [min((b for b in found if b is not None), default=None) for found in zip(*map(_both, sides), strict=True)]
    if first.onset_through is not None and not narrowed and (bad[0] is None or bad[0] != bad[1]):
        span = f"{first.onset_step} to {first.onset_through}"
        return CANNOT_TELL, f"{equal}, and sick again, but nothing shows by which of the updates {span}"
    return DETERMINISTIC, f"{equal}, and sick again at update {again.surely_by}: data or numerics"


def is_one_of_two(found: Diagnosis) -> bool:
    """True if either of two updates did the harm: that with the first sign, or the one before it."""
    return found.onset_step is not None and found.onset_through == found.onset_step + 1


def _both(side: Comparison) -> tuple[int | None, int | None]:
    return side.bad_then, side.bad_now


def _rank(first: Diagnosis, sides: Sequence[Comparison]) -> int | None:
    """Return the rank whose numbers differed first. None if that is not certain: another one differed in the same
    number of the same update, or did not report it."""
    if len(sides) == 1:
        return 0
    found = sorted((s.differs, _SIGNALS.index(s.signal), n) for n, s in enumerate(sides) if s.differs is not None)
    if not found:
        ranks = first.evidence.get("ranks")
        return ranks[0] if isinstance(ranks, list) and len(ranks) == 1 else None
    (step, signal, rank), *others = found
    alone = all(other[:2] != (step, signal) for other in others)
    reported = all(side.losses and (signal == 0 or side.norms) for side in sides)
    return rank if alone and reported and signal < 2 else None


def two_curves(then: Iterable[Row], now: Iterable[Row], shown: Replay, first: Diagnosis) -> tuple[ReplayedUpdate, ...]:
    """Return the numbers of both times around the onset, or around the first difference."""
    before, again = _by_step(then), _by_step(now)
    around = min(first.surely_by, first.surely_by if shown.differs is None else shown.differs)
    steps = [s for s in sorted({*before, *again}) if max(shown.began, around - _BEFORE) < s <= first.step]
    nothing: Row = (0, None, None, None, None)
    lines = ((s, before.get(s, [nothing])[-1], again.get(s, [nothing])[-1]) for s in steps[:MOST_REPLAYED])
    return tuple(ReplayedUpdate(s, worded(a[1]), worded(a[2]), worded(b[1]), worded(b[2])) for s, a, b in lines)


def _by_step(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """Group the rows by update: one may have reported more than once."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return found


def _differ(one: float | None, other: float | None) -> bool:
    """True if two numbers that are both known differ in a bit. Every NaN is the same."""
    return one is not None and other is not None and one.hex() != other.hex()


def _first_bad(rows: dict[int, list[Row]], first: int, last: int) -> int | None:
    bad: Iterator[int] = (
        step
        for step, of_step in rows.items()
        if first <= step <= last and any(v is not None and not math.isfinite(v) for row in of_step for v in row[1:3])
    )
    return min(bad, default=None)
