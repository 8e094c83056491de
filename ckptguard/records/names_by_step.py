"""All record names from one listing, ordered by series and step: enough to choose among very many."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ckptguard.records.kept import FOLDER as KEPT
from ckptguard.records.ledger import FOLDER as LEDGER
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run, record_names
from ckptguard.values.ids import CheckpointId, Step, parse_id, record_step, series_folder, series_from_folder

FOLDERS = (LEDGER, MANIFESTS, QUARANTINE, KEPT)  # whose names count, as <folder>/<series>/<name>
_STEP = re.compile(r"\d{12}(?:-\d{12})*|-")


class StepRecords(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one step of a series: its ledger names, and the ids with a manifest, quarantine mark or kept
    copy."""

    series: str
    names: tuple[str, ...] = ()
    sealed: frozenset[CheckpointId] = frozenset()
    quarantined: frozenset[CheckpointId] = frozenset()
    kept: frozenset[CheckpointId] = frozenset()


class ListedSteps:
    """One ordered listing. It never changes, and several threads may use it."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for key in keys:
            parts = key.split("/")
            if len(parts) == 3 and parts[0] in FOLDERS:
                self._keys[parts[1]][parts[2].partition(".")[0]].append(key)

    def __len__(self) -> int:
        """Return how many names there are."""
        return sum(len(keys) for steps in self._keys.values() for keys in steps.values())

    @property
    def series(self) -> list[str]:
        """Every series with any record, sorted."""
        return sorted(map(series_from_folder, self._keys))

    def below(self, series: str, before_step: int | None = None) -> Iterator[StepRecords]:
        """Yield the steps of a series that have verdicts, newest first.

        `before_step` is exclusive, and ignores names without a single number. Empty entries are included: reading one
        shows that it does not count.
        """
        steps: Mapping[str, list[str]] = self._keys.get(series_folder(series), {})
        limit = None if before_step is None else record_step(before_step)
        for step in sorted(filter(_STEP.fullmatch, steps), reverse=True):
            if limit is not None and step.isdigit() and step >= limit and len(step) >= len(limit):
                continue
            found = _of_one_step(series, steps[step])
            if found.names:
                yield found

    def of(self, series: str, step: Step) -> StepRecords:
        """Return the records of one step."""
        steps: Mapping[str, list[str]] = self._keys.get(series_folder(series), {})
        return _of_one_step(series, steps.get(record_step(step), []))


def list_steps(run: Run) -> ListedSteps:
    """List all current record names."""
    return ListedSteps(record_names(run, ""))


def _of_one_step(series: str, keys: Iterable[str]) -> StepRecords:
    found: dict[str, list[str]] = {folder: [] for folder in FOLDERS}
    for key in keys:
        top, _, name = key.split("/")
        found[top].append(name)
    marks = {
        top: frozenset(id for n in found[top] if n.endswith(".json") and (id := parse_id(series, n[: -len(".json")])))
        for top in (MANIFESTS, QUARANTINE, KEPT)
    }
    return StepRecords(
        series=series,
        names=tuple(found[LEDGER]),
        sealed=marks[MANIFESTS],
        quarantined=marks[QUARANTINE],
        kept=marks[KEPT],
    )
