"""What the records say about a run: one look, shared by the operations of a call."""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field

from ckptguard.decisions.known_good import (
    Standing,
    by_generation,
    ever_good,
    parse_verdict_name,
    standings,
    weightier,
)
from ckptguard.errors import RecordsError
from ckptguard.records.ledger import latest_verdict, ledger_names, series_names
from ckptguard.records.manifests import read_manifest, sealed_generations
from ckptguard.records.names_by_step import ListedSteps, StepRecords, list_steps
from ckptguard.records.quarantine import quarantined_generations, quarantined_of_series, read_quarantined
from ckptguard.records.run import Run
from ckptguard.records.run_settings import accepted_references
from ckptguard.values.ids import CheckpointId
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Facts, Outcome, Verdict

_MOST_MANIFESTS = 64  # remembered at once: that of a large checkpoint takes some 25 MB


@dataclass
class History:
    """Ledger names, manifests and quarantine marks of a run, read on demand and remembered.

    It is what the records said when they were read: `refresh` reads the names of one series again. An answer that is
    out of date does no harm: manifests and verdicts are created exclusively, and who comes second is told so.
    """

    run: Run
    names: dict[str, list[str]]
    quarantined: dict[str, set[CheckpointId]]
    _sealed: dict[str, dict[CheckpointId, None]] = field(default_factory=dict)
    _standings: dict[str, dict[CheckpointId, Standing]] = field(default_factory=dict)
    _by_step: dict[str, dict[int | None, set[CheckpointId]]] = field(default_factory=dict)
    _manifests: dict[CheckpointId, Manifest | None] = field(default_factory=dict)
    _verdicts: dict[CheckpointId, Verdict | None] = field(default_factory=dict)
    _names_of: dict[str, dict[CheckpointId, list[str]]] = field(default_factory=dict)
    _ever_good: dict[str, set[CheckpointId]] = field(default_factory=dict)
    _kept: dict[str, set[CheckpointId]] | None = None

    def standings(self, series: str) -> dict[CheckpointId, Standing]:
        """The current standing of each generation of a series, by names alone."""
        if series not in self._standings:
            self._standings[series] = standings(series, self.names.get(series, ()))
        return self._standings[series]

    def has_verdict(self, id: CheckpointId) -> bool:
        """Whether the ledger holds an entry of this generation."""
        return id in self.standings(id.series)

    def sealed(self, series: str) -> KeysView[CheckpointId]:
        """The generations of a series that have a manifest."""
        if series not in self._sealed:
            self._sealed[series] = dict.fromkeys(sealed_generations(self.run, series))
        return self._sealed[series].keys()

    def is_quarantined(self, id: CheckpointId) -> bool:
        """Whether a generation was moved aside."""
        return id in self.quarantined.get(id.series, ())

    def may_be_kept(self, id: CheckpointId) -> bool:
        """Whether there can be a kept copy, as far as that is known without asking for it."""
        return self._kept is None or id in self._kept.get(id.series, ())

    def manifest(self, id: CheckpointId) -> Manifest | None:
        """A manifest, or None; one that cannot be read does not exist."""
        if id in self._manifests:
            return self._manifests[id]
        try:
            manifest = read_manifest(self.run, id)
        except RecordsError:
            manifest = None
        if len(self._manifests) >= _MOST_MANIFESTS:
            del self._manifests[next(iter(self._manifests))]
        self._manifests[id] = manifest
        return manifest

    def verdict(self, id: CheckpointId) -> Verdict | None:
        """The verdict that counts for a generation; entries that cannot be read do not exist."""
        if id not in self._verdicts:
            self._verdicts[id] = latest_verdict(self.run, id, self._entries(id.series).get(id, []))
        return self._verdicts[id]

    def refresh(self, series: str) -> None:
        """List the names of one series again: its verdicts, manifests and marks of quarantine."""
        names = series_names(self.run, series)
        known = set(self.names.get(series, ()))
        fresh = [name for name in names if name not in known]
        if len(known) + len(fresh) != len(names):  # entries are gone, which nobody of ours does: begin anew
            self.names[series] = []
            for remembered in (self._standings, self._names_of, self._ever_good, self._by_step):
                remembered.pop(series, None)
            self._verdicts = {id: verdict for id, verdict in self._verdicts.items() if id.series != series}
            fresh = names
        for name in fresh:
            self.note_verdict(series, name)
        sealed = sealed_generations(self.run, series)
        if self._sealed.get(series, {}).keys() != set(sealed):
            self._sealed[series] = dict.fromkeys(sealed)
            self._by_step.pop(series, None)
            self._manifests = {id: m for id, m in self._manifests.items() if id.series != series or m is not None}
        self.quarantined[series] = quarantined_of_series(self.run, series)

    def note_verdict(self, series: str, name: str) -> None:
        """Take over one more ledger name, such as that of a verdict that was just written."""
        entry = parse_verdict_name(series, name)
        if name in self.names.setdefault(series, []) or entry is None:
            return
        self.names[series].append(name)
        self._verdicts.pop(entry.id, None)
        if series in self._standings:
            self._standings[series][entry.id] = weightier(self._standings[series].get(entry.id), entry)
        if series in self._names_of:
            self._names_of[series].setdefault(entry.id, []).append(name)
        if series in self._ever_good and entry.outcome is Outcome.GOOD:
            self._ever_good[series].add(entry.id)
        if series in self._by_step:
            self._by_step[series].setdefault(entry.id.step, set()).add(entry.id)

    def _entries(self, series: str) -> dict[CheckpointId, list[str]]:
        """The ledger names of a series by generation."""
        if series not in self._names_of:
            self._names_of[series] = by_generation(series, self.names.get(series, ()))
        return self._names_of[series]

    def generations(self, series: str, step: int | None) -> list[CheckpointId]:
        """Every generation of a step that any record knows, ascending."""
        if series not in self._by_step:
            by_step: dict[int | None, set[CheckpointId]] = {}
            for id in (*self.sealed(series), *self.standings(series)):
                by_step.setdefault(id.step, set()).add(id)
            self._by_step[series] = by_step
        aside = {id for id in self.quarantined.get(series, ()) if id.step == step}
        return sorted(self._by_step[series].get(step, set()) | aside, key=lambda id: id.generation)

    def current(self, series: str, step: int | None, path: str) -> CheckpointId | None:
        """The generation whose content should lie in place under `path`: the newest one that was sealed for this
        path and not quarantined, unless a newer one of this path was quarantined. None at first sight.

        RecordsError if a manifest that may be the one cannot be read: what lies there is then not taken for new.
        """
        for id in reversed(self.generations(series, step)):
            aside = self.is_quarantined(id)
            if aside and self._quarantined_path(id) in (path, None):
                return None
            if aside or id not in self.sealed(series):
                continue
            manifest = self.manifest(id)
            if manifest is None:
                raise RecordsError(
                    f"the manifest of {id} of {series} is damaged: {path} cannot be compared with it",
                    hint="ckptguard reseal, if what lies there is known to be right",
                )
            if manifest.path == path:
                return id
        return None

    def current_if_readable(self, series: str, step: int | None, path: str) -> CheckpointId | None:
        """The same where it only is for showing or choosing: None also if a manifest cannot be read."""
        try:
            return self.current(series, step, path)
        except RecordsError:
            return None

    def _quarantined_path(self, id: CheckpointId) -> str | None:
        mark = read_quarantined(self.run, id)
        return mark.path if mark is not None else None

    def next_id(self, series: str, step: int | None) -> CheckpointId:
        """The id that the next content of a step gets. A generation with verdicts but no manifest (INCOMPLETE so far)
        is still open and keeps its id."""
        known = self.generations(series, step)
        if not known:
            return CheckpointId(series, step, 1)
        newest = known[-1]
        is_open = newest not in self.sealed(series) and not self.is_quarantined(newest)
        return newest if is_open else CheckpointId(series, step, newest.generation + 1)

    def was_good(self, id: CheckpointId) -> bool:
        """Whether any verdict of this generation was ever GOOD."""
        if id.series not in self._ever_good:
            self._ever_good[id.series] = ever_good(id.series, self.names.get(id.series, ()))
        return id in self._ever_good[id.series]

    def reference(self, id: CheckpointId) -> tuple[Manifest, Verdict | None] | None:
        """The manifest that a checkpoint's schema must match: the nearest lower-step GOOD of the series, else the
        nearest higher; of a step without number, the newest earlier GOOD generation. An accepted schema counts as
        GOOD, and an accepted checkpoint needs no reference."""
        accepted = accepted_references(self.run, id.series)
        if id in accepted:
            return None
        good = {k for k, s in self.standings(id.series).items() if s.outcome is Outcome.GOOD} | accepted
        good.discard(id)
        if id.step is None:
            order = sorted((k for k in good if k.step is None), key=lambda k: -k.generation)
        else:
            lower = sorted((k for k in good if k.step is not None and k.order < id.order), key=_order, reverse=True)
            higher = sorted((k for k in good if k.step is not None and k.order > id.order), key=_order)
            order = [*lower, *higher]
        for other in order:
            manifest = self.manifest(other)
            if manifest is not None:
                return manifest, self.verdict(other)
        return None

    def previous(self, series: str, step: int | None) -> tuple[Manifest, Facts | None] | None:
        """The nearest lower step of the series that training went on from, and what its verdict knows: BAD ones too,
        but none that a rollback put aside. None for a step without number."""
        if step is None:
            return None
        lower = [k for k in self.sealed(series) if k.step is not None and k.step < step and not self.is_quarantined(k)]
        for id in sorted(lower, key=_order, reverse=True):
            manifest = self.manifest(id)
            if manifest is not None:
                verdict = self.verdict(id)
                return manifest, verdict.facts if verdict is not None and not verdict.place_damaged else None
        return None


def _order(id: CheckpointId) -> tuple[int, int]:
    return id.order


def histories_by_step(
    run: Run, *, before_step: int | None = None, listed: ListedSteps | None = None
) -> Iterator[History]:
    """The history of each step that has verdicts by itself, highest first: for who wants the newest of very many. One
    listing of names, if it is not there already, and then what is asked for."""
    steps = list_steps(run) if listed is None else listed
    for found in steps.below(before_step):
        yield _history_of(run, found)


def history_of_step(run: Run, series: str, step: int, listed: ListedSteps) -> History:
    """The history of one step of a series, of which there need be none."""
    return _history_of(run, listed.of(step), series)


def _history_of(run: Run, found: StepRecords, *series: str) -> History:
    every = {*found.names, *found.sealed, *found.quarantined, *series}
    return History(
        run=run,
        names=found.names,
        quarantined=found.quarantined,
        _sealed={name: dict.fromkeys(found.sealed.get(name, ())) for name in every},
        _kept=found.kept,
    )


def load_history(run: Run) -> History:
    """Read the names of the ledger and of the quarantine."""
    return History(run=run, names=ledger_names(run), quarantined=quarantined_generations(run))


def history_of_series(run: Run, series: str) -> History:
    """The same of one series alone: what it costs does not depend on the others."""
    return History(
        run=run,
        names={series: series_names(run, series)},
        quarantined={series: quarantined_of_series(run, series)},
    )
