"""From the ledger's names alone to the known-good checkpoint of a series. Pure.

The rules: of one generation the verdict with the highest number counts, and the worst of those that share a number.
Known-good is the highest step whose sealed bytes are GOOD, latest generation first. Order never comes from a clock.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from ckptguard.values.ids import CheckpointId, parse_id
from ckptguard.values.verdict import Outcome, worst

_NAME = re.compile(
    r"(?P<id>(?:\d{12}|-)\.[1-9]\d*)\.(?P<number>\d{4,9})\.(?P<outcome>good|suspect|incomplete|bad)\.json"
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
    """Generations that may be known-good, best first, from the ledger names of each series. Those are the ones that
    were GOOD at some time: a generation whose place was damaged since may be whole in a copy, which only its entry
    tells. The caller takes the first whose entry says that its sealed bytes are good, and that is present.
    `before_step` is exclusive; ids in `exclude` are left out. A checkpoint without a step is never among them."""
    chosen: list[Standing] = []
    for series in sorted(names):
        good = ever_good(series, names[series])
        for id, standing in standings(series, names[series]).items():
            in_time = id.step is not None and (before_step is None or id.step < before_step)
            if id in good and in_time and id not in exclude:
                chosen.append(standing)
    return sorted(chosen, key=lambda s: s.id.order, reverse=True)
