"""All names in the records by one listing, put in order by step: enough to choose a checkpoint among very many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from ckptguard.errors import ObjectMissingError
from ckptguard.names import STEP_DIGITS, parse_id, series_from_folder
from ckptguard.records.kept import FOLDER as KEPT
from ckptguard.records.ledger import FOLDER as LEDGER
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run

Key = tuple[int | None, int]


class StepRecords(msgspec.Struct, frozen=True, kw_only=True):
    """What the names say of one step, by series: its ledger names, and of which generations there are a manifest, a
    mark of quarantine and one of a kept copy."""

    names: dict[str, list[str]]
    sealed: dict[str, set[Key]]
    quarantined: dict[str, set[Key]]
    kept: dict[str, set[Key]]


def steps_on_record(run: Run, *, before_step: int | None = None) -> Iterator[StepRecords]:
    """The steps that have verdicts, highest first; `before_step` is exclusive. Empty entries are not told from others:
    whoever reads one finds that it does not exist."""
    try:
        listed = run.records.names()
    except ObjectMissingError:
        return
    by_step: defaultdict[str, list[str]] = defaultdict(list)
    for key in listed:
        at = key.find("/", key.find("/") + 1) + 1  # behind the series
        by_step[key[at : at + STEP_DIGITS]].append(key)
    limit = None if before_step is None else f"{before_step:0{STEP_DIGITS}d}"
    for step in sorted(by_step, reverse=True):
        if len(step) == STEP_DIGITS and step.isdigit() and (limit is None or step < limit):
            found = _of_one_step(by_step[step])
            if found.names:
                yield found


def _of_one_step(keys: list[str]) -> StepRecords:
    records = StepRecords(names={}, sealed={}, quarantined={}, kept={})
    marks = {MANIFESTS: records.sealed, QUARANTINE: records.quarantined, KEPT: records.kept}
    for key in keys:
        top, folder, name = key.split("/", 2)
        series = series_from_folder(folder)
        if top == LEDGER:
            records.names.setdefault(series, []).append(name)
            continue
        parsed = parse_id(name.removesuffix(".json")) if name.endswith(".json") else None
        if parsed is not None and top in marks:
            marks[top].setdefault(series, set()).add(parsed)
    return records
