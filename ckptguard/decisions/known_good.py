"""From the ledger's names alone to the known-good checkpoint of a series. Pure.

The rules: of one generation the verdict with the highest number counts, and the worst of those that share a number.
Known-good is the highest step whose sealed bytes are GOOD, latest generation first. Order never comes from a clock.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from ckptguard.values.ids import checkpoint_id, parse_id, record_name
from ckptguard.values.verdict import Outcome, worst

_NAME = re.compile(
    r"(?P<id>(?:\d{12}|-)\.[1-9]\d*)\.(?P<number>\d{4,9})\.(?P<outcome>good|suspect|incomplete|bad)\.json"
)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where one generation stands: its current outcome and the number of the verdict that says so."""

    step: int | None
    generation: int
    number: int
    outcome: Outcome

    @property
    def id(self) -> str:
        """``<step>.<generation>``."""
        return checkpoint_id(self.step, self.generation)


def verdict_name(step: int | None, generation: int, number: int, outcome: Outcome) -> str:
    """The ledger name of a verdict; it alone tells id, order and outcome."""
    return f"{record_name(step, generation)}.{number:04d}.{outcome.value}.json"


def parse_verdict_name(name: str) -> Standing | None:
    """What a ledger name says; None for a name that is no ledger entry's."""
    match = _NAME.fullmatch(name)
    parsed = parse_id(match["id"]) if match else None
    if match is None or parsed is None:
        return None
    return Standing(
        step=parsed[0], generation=parsed[1], number=int(match["number"]), outcome=Outcome(match["outcome"])
    )


def standings(names: Iterable[str]) -> dict[tuple[int | None, int], Standing]:
    """The current standing of every (step, generation) among a series' ledger names."""
    by_id: dict[tuple[int | None, int], list[Standing]] = {}
    for name in names:
        entry = parse_verdict_name(name)
        if entry is not None:
            by_id.setdefault((entry.step, entry.generation), []).append(entry)
    current = {}
    for key, entries in by_id.items():
        newest = max(e.number for e in entries)
        same = [e for e in entries if e.number == newest]
        current[key] = msgspec.structs.replace(same[0], outcome=worst(e.outcome for e in same))
    return current


def by_generation(names: Iterable[str]) -> dict[tuple[int | None, int], list[str]]:
    """A series' ledger names by the (step, generation) that they speak of."""
    found: dict[tuple[int | None, int], list[str]] = {}
    for name in names:
        entry = parse_verdict_name(name)
        if entry is not None:
            found.setdefault((entry.step, entry.generation), []).append(name)
    return found


def ever_good(names: Iterable[str]) -> set[tuple[int | None, int]]:
    """(step, generation) of every generation of a series that had a GOOD verdict at some time."""
    entries = (parse_verdict_name(name) for name in names)
    return {(e.step, e.generation) for e in entries if e is not None and e.outcome is Outcome.GOOD}


def choose_known_good(
    names: Mapping[str, Collection[str]], *, before_step: int | None = None, exclude: Collection[str] = ()
) -> list[tuple[str, Standing]]:
    """Generations that may be known-good, best first, from the ledger names of each series.

    Those are the ones that were GOOD at some time: a generation whose place was damaged since may be whole in a copy,
    which only its entry tells. The caller takes the first whose entry says that its sealed bytes are good, and that
    is present. `before_step` is exclusive; ids in `exclude` are left out. A checkpoint without a step is never among
    them.
    """
    chosen = []
    for series in sorted(names):
        good = ever_good(names[series])
        for key, standing in standings(names[series]).items():
            in_time = standing.step is not None and (before_step is None or standing.step < before_step)
            if key in good and in_time and standing.id not in exclude:
                chosen.append((series, standing))
    return sorted(chosen, key=lambda c: (c[1].step or 0, c[1].generation), reverse=True)
