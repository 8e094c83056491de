"""Find the known-good checkpoint of a series from the ledger's names alone. Pure.

For one generation the verdict with the highest number counts. Of verdicts with the same number the worst counts.
Known-good is the highest step whose sealed bytes are GOOD, latest generation first. No clock decides the order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from ckptguard.values.ids import CheckpointId, Step, numbers_of, parse_id, single_number
from ckptguard.values.verdict import Outcome, worst

_NAME = re.compile(
    r"(?P<id>(?:\d{12}(?:-\d{12})*|-)\.[1-9]\d*)\.(?P<number>\d{4,9})\.(?P<outcome>good|suspect|incomplete|bad)\.json"
)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The current outcome of one generation, and the number of the verdict that gives it."""

    id: CheckpointId
    number: int
    outcome: Outcome


def verdict_name(standing: Standing) -> str:
    """Return the ledger name of a verdict. It contains the id, the order and the outcome."""
    return f"{standing.id.record_name}.{standing.number:04d}.{standing.outcome.value}.json"


def parse_verdict_name(series: str, name: str) -> Standing | None:
    """Parse a ledger name of a series; None if it is not a ledger entry."""
    match = _NAME.fullmatch(name)
    parsed = parse_id(series, match["id"]) if match else None
    if match is None or parsed is None:
        return None
    return Standing(id=parsed, number=int(match["number"]), outcome=Outcome(match["outcome"]))


def standings(series: str, names: Iterable[str]) -> dict[CheckpointId, Standing]:
    """Return the current standing of every generation that a series' ledger names mention."""
    current: dict[CheckpointId, Standing] = {}
    for name in names:
        entry = parse_verdict_name(series, name)
        if entry is not None:
            current[entry.id] = weightier(current.get(entry.id), entry)
    return current


def weightier(one: Standing | None, other: Standing) -> Standing:
    """Return the verdict that counts for one generation: the later one, or the worse of two with one number."""
    if one is None or one.number < other.number:
        return other
    if one.number > other.number:
        return one
    return msgspec.structs.replace(one, outcome=worst((one.outcome, other.outcome)))


def by_generation(series: str, names: Iterable[str]) -> dict[CheckpointId, list[str]]:
    """Group a series' ledger names by generation."""
    found: dict[CheckpointId, list[str]] = {}
    for name in names:
        entry = parse_verdict_name(series, name)
        if entry is not None:
            found.setdefault(entry.id, []).append(name)
    return found


def since(id: CheckpointId, names: Iterable[str], outcomes: Collection[Outcome]) -> Standing | None:
    """Return the first of a generation's newest verdicts that all say one of these outcomes. None if the newest says
    another one."""
    entries: dict[int, Standing] = {}
    for name in names:
        entry = parse_verdict_name(id.series, name)
        if entry is not None and entry.id == id:
            entries[entry.number] = weightier(entries.get(entry.number), entry)
    found = None
    for number in sorted(entries, reverse=True):
        if entries[number].outcome not in outcomes:
            break
        found = entries[number]
    return found


def ever_good(series: str, names: Iterable[str]) -> set[CheckpointId]:
    """Return every generation of a series that ever had a GOOD verdict."""
    entries = (parse_verdict_name(series, name) for name in names)
    return {e.id for e in entries if e is not None and e.outcome is Outcome.GOOD}


def choose_known_good(
    names: Mapping[str, Collection[str]], *, before_step: int | None = None, exclude: Collection[CheckpointId] = ()
) -> list[Standing]:
    """Return the generations that may be known-good, series by series, newest first.

    Each of them was GOOD at some time. If its files were damaged later, a copy may still be whole, which only its entry
    says. So the caller takes the first one whose entry says GOOD and whose bytes exist.
    `before_step` is exclusive, and ignores names without a single number. Ids in `exclude` are left out.
    """
    chosen: list[Standing] = []
    for series in sorted(names):
        good = ever_good(series, names[series])
        standing_of = standings(series, names[series])
        for id, standing in sorted(standing_of.items(), key=lambda item: item[0].order, reverse=True):
            in_time = before_step is None or id.number is None or id.number < before_step
            if id in good and in_time and id not in exclude:
                chosen.append(standing)
    return chosen


# Counters of training progress, the finest first: counters inside a checkpoint, then those in its name.
OPTIMIZER_STEP = "optimizer step"
COUNTERS = ("global_step", "iter_num", "iteration", "num_updates", "step", OPTIMIZER_STEP, "epoch")
NUMBER_IN_NAME = "number in its name"
NAMED = ("step in its name", "epoch in its name", NUMBER_IN_NAME)


class Standpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The newest known-good checkpoint of a series, to compare it with other series. `counters` maps each kind to its
    value."""

    series: str
    counters: Mapping[str, int]
    has_optimizer: bool
    sealed_at: str


def choose_series(heads: Sequence[Standpoint]) -> tuple[int, str]:
    """Return the index of the series with the newest known-good checkpoint, and why; "" if there is only one.

    Series with optimizer state come before series with weights alone. The finest counter that all of them have decides.
    Without a common counter, or if it is equal, the series that was sealed last wins.
    """
    if len(heads) == 1:
        return 0, ""
    resumable = [n for n, head in enumerate(heads) if head.has_optimizer]
    left = resumable or list(range(len(heads)))
    kind = next((k for k in (*COUNTERS, *NAMED) if all(k in heads[n].counters for n in left)), None)
    best = max(left, key=lambda n: (heads[n].counters[kind] if kind else 0, heads[n].sealed_at, heads[n].series))
    if len(left) == 1:
        return best, "the only one of several series with optimizer state"
    value = f"has the highest {kind} ({heads[best].counters[kind]})" if kind else "was sealed last"
    return best, f"of {len(left)} series this one {value}"


def finest_counter(counters: Mapping[str, int]) -> str | None:
    """Return the finest counter inside a checkpoint as text, or None."""
    return next((f"{kind} {counters[kind]}" for kind in COUNTERS if kind in counters), None)


def order_words(step: Step) -> str:
    """Say what orders the checkpoints of a series."""
    if step is None:
        return "the order in which its contents were saved under this name"
    return "the number in its name" if isinstance(step, int) else "the numbers in its name, one after the other"


def may_be_newer(series: str, step: Step, known_good: CheckpointId) -> bool:
    """True if a checkpoint without a verdict may be newer than the known-good one, judged by names alone. A fixed name
    always may be."""
    if series == known_good.series:
        return step is None or numbers_of(step) > numbers_of(known_good.step)
    number = single_number(step)
    return number is None or known_good.number is None or number > known_good.number
