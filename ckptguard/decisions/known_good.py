"""From the ledger's names alone to the known-good checkpoint of a series. Pure.

The rules: of one generation the verdict with the highest number counts, and the worst of those that share a number.
Known-good is the highest step whose sealed bytes are GOOD, latest generation first. Order never comes from a clock.
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
    """Where one generation stands: its current outcome and the number of the verdict that says so."""

    id: CheckpointId
    number: int
    outcome: Outcome


def verdict_name(standing: Standing) -> str:
    """The ledger name of a verdict; it alone tells id, order and outcome."""
    return f"{standing.id.record_name}.{standing.number:04d}.{standing.outcome.value}.json"


def parse_verdict_name(series: str, name: str) -> Standing | None:
    """What a ledger name of a series says; None for a name that is no ledger entry's."""
    match = _NAME.fullmatch(name)
    parsed = parse_id(series, match["id"]) if match else None
    if match is None or parsed is None:
        return None
    return Standing(id=parsed, number=int(match["number"]), outcome=Outcome(match["outcome"]))


def standings(series: str, names: Iterable[str]) -> dict[CheckpointId, Standing]:
    """The current standing of every generation among a series' ledger names."""
    current: dict[CheckpointId, Standing] = {}
    for name in names:
        entry = parse_verdict_name(series, name)
        if entry is not None:
            current[entry.id] = weightier(current.get(entry.id), entry)
    return current


def weightier(one: Standing | None, other: Standing) -> Standing:
    """Of two verdicts on one generation the one that counts: the later one, the worse one of those that are equal."""
    if one is None or one.number < other.number:
        return other
    if one.number > other.number:
        return one
    return msgspec.structs.replace(one, outcome=worst((one.outcome, other.outcome)))


def by_generation(series: str, names: Iterable[str]) -> dict[CheckpointId, list[str]]:
    """A series' ledger names by the generation that they speak of."""
    found: dict[CheckpointId, list[str]] = {}
    for name in names:
        entry = parse_verdict_name(series, name)
        if entry is not None:
            found.setdefault(entry.id, []).append(name)
    return found


def ever_good(series: str, names: Iterable[str]) -> set[CheckpointId]:
    """Every generation of a series that had a GOOD verdict at some time."""
    entries = (parse_verdict_name(series, name) for name in names)
    return {e.id for e in entries if e is not None and e.outcome is Outcome.GOOD}


def choose_known_good(
    names: Mapping[str, Collection[str]], *, before_step: int | None = None, exclude: Collection[CheckpointId] = ()
) -> list[Standing]:
    """Generations that may be known-good, series by series, newest first, from the ledger names of each. Those were
    GOOD at some time: a generation whose place was damaged since may be whole in a copy, which only its entry tells.
    The caller takes the first whose entry says that its sealed bytes are good, and that is present.
    `before_step` is exclusive, and says nothing of names that do not state one number; ids in `exclude` are left
    out."""
    chosen: list[Standing] = []
    for series in sorted(names):
        good = ever_good(series, names[series])
        standing_of = standings(series, names[series])
        for id, standing in sorted(standing_of.items(), key=lambda item: item[0].order, reverse=True):
            in_time = before_step is None or id.number is None or id.number < before_step
            if id in good and in_time and id not in exclude:
                chosen.append(standing)
    return chosen


# What counts the progress of a training, the finest first: counters inside a checkpoint, then those in its name.
OPTIMIZER_STEP = "optimizer step"
COUNTERS = ("global_step", "iter_num", "iteration", "num_updates", "step", OPTIMIZER_STEP, "epoch")
NUMBER_IN_NAME = "number in its name"
NAMED = ("step in its name", "epoch in its name", NUMBER_IN_NAME)


class Standpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the newest known-good checkpoint of a series stands among those of others: `counters` by kind."""

    series: str
    counters: Mapping[str, int]
    has_optimizer: bool
    sealed_at: str


def choose_series(heads: Sequence[Standpoint]) -> tuple[int, str]:
    """Which of several series has the newest known-good checkpoint (its place in `heads`), and why it is that one; ""
    where there is no other.

    Those that hold optimizer state go before those that hold weights alone. They are compared by the finest counter
    that all of them have. Where they have none in common, or it is equal, the one that was sealed last wins.
    """
    if len(heads) == 1:
        return 0, ""
    resumable = [n for n, head in enumerate(heads) if head.has_optimizer]
    left = resumable or list(range(len(heads)))
    kind = next((k for k in (*COUNTERS, *NAMED) if all(k in heads[n].counters for n in left)), None)
    best = max(left, key=lambda n: (heads[n].counters[kind] if kind else 0, heads[n].sealed_at, heads[n].series))
    if len(left) == 1:
        return best, "of several series the only one with optimizer state"
    value = f"has the highest {kind} ({heads[best].counters[kind]})" if kind else "was sealed last"
    return best, f"of {len(left)} series this one {value}"


def finest_counter(counters: Mapping[str, int]) -> str | None:
    """The finest of some counters inside a checkpoint, in words; None where it holds none."""
    return next((f"{kind} {counters[kind]}" for kind in COUNTERS if kind in counters), None)


def order_words(step: Step) -> str:
    """What puts the checkpoints of a series in order, in words."""
    if step is None:
        return "the order in which its contents were saved under this name"
    return "the number in its name" if isinstance(step, int) else "the numbers in its name, one after the other"


def may_be_newer(series: str, step: Step, known_good: CheckpointId) -> bool:
    """True if a checkpoint without a verdict may be newer than the known-good one, by names alone. What lies under a
    fixed name may always be."""
    if series == known_good.series:
        return step is None or numbers_of(step) > numbers_of(known_good.step)
    number = single_number(step)
    return number is None or known_good.number is None or number > known_good.number
