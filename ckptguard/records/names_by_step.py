"""All names in the records by one listing, put in order by step: enough to choose a checkpoint among very many."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby, islice

import msgspec

from ckptguard.records.kept import FOLDER as KEPT
from ckptguard.records.ledger import FOLDER as LEDGER
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.manifests import sealed_id
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run, record_names
from ckptguard.values.ids import MAX_STEP, STEP_DIGITS, CheckpointId, series_from_folder

FOLDERS = (LEDGER, MANIFESTS, QUARANTINE, KEPT)  # whose names count, as <folder>/<series>/<name>
_COUNTED = tuple(f"{folder}/" for folder in FOLDERS)


class StepRecords(msgspec.Struct, frozen=True, kw_only=True):
    """What the names say of one step, by series: ledger names, and generations with a manifest or a mark."""

    names: dict[str, list[str]]
    sealed: dict[str, set[CheckpointId]]
    quarantined: dict[str, set[CheckpointId]]
    kept: dict[str, set[CheckpointId]]


class ListedSteps:
    """One listing, put in order. It is never changed, and may be used by several threads."""

    def __init__(self, keys: Iterable[str]) -> None:
        by_step: defaultdict[str, list[str]] = defaultdict(list)
        for key in keys:
            by_step[_step(key)].append(key)
        steps = sorted(step for step in by_step if len(step) == STEP_DIGITS and step.isdigit())
        self._keys = [
            key for step in steps for key in by_step[step] if key.startswith(_COUNTED) and key.count("/") == 2
        ]

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._keys)

    def below(self, before_step: int | None = None) -> Iterator[StepRecords]:
        """The steps before `before_step` that have verdicts, highest first. An entry may turn out to be empty."""
        above = 0 if before_step is None else len(self._keys) - self._first(before_step)
        steps = groupby(islice(reversed(self._keys), above, None), key=_step)
        found = (_of_one_step(reversed([*keys])) for _, keys in steps)
        return (one for one in found if one.names)

    def of(self, step: int) -> StepRecords:
        """What they say of one step."""
        return _of_one_step(self._keys[self._first(step) : self._first(step + 1)])

    def _first(self, step: int) -> int:
        """Where the names of this step and higher ones begin."""
        if step > MAX_STEP:
            return len(self._keys)
        return bisect_left(self._keys, f"{step:0{STEP_DIGITS}d}", key=_step)


def list_steps(run: Run) -> ListedSteps:
    """All names in the records as they are now, by one listing."""
    return ListedSteps(record_names(run, ""))


def _step(key: str) -> str:
    at = key.find("/", key.find("/") + 1) + 1  # behind the series
    return key[at : at + STEP_DIGITS]


def _of_one_step(keys: Iterable[str]) -> StepRecords:
    records = StepRecords(names={}, sealed={}, quarantined={}, kept={})
    marks = {MANIFESTS: records.sealed, QUARANTINE: records.quarantined, KEPT: records.kept}
    for key in keys:
        top, folder, name = key.split("/")
        series = series_from_folder(folder)
        if top == LEDGER:
            records.names.setdefault(series, []).append(name)
            continue
        parsed = sealed_id(series, name)  # marks are named as manifests are
        if parsed is not None:
            marks[top].setdefault(series, set()).add(parsed)
    return records
