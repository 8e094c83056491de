"""What the records say about a run: one look, shared by the operations of a call."""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field

from ckptguard.decisions.known_good import Standing, by_generation, ever_good, standings
from ckptguard.errors import RecordsError
from ckptguard.records.ledger import latest_verdict, ledger_names
from ckptguard.records.manifests import read_manifest, sealed_generations
from ckptguard.records.names_by_step import ListedSteps, StepRecords, list_steps
from ckptguard.records.quarantine import quarantined_generations, read_quarantined
from ckptguard.records.run import Run
from ckptguard.records.run_settings import accepted_references
from ckptguard.values.ids import checkpoint_id
from ckptguard.values.manifest import Manifest
from ckptguard.values.verdict import Facts, Outcome, Verdict

Key = tuple[int | None, int]


@dataclass
class History:
    """Ledger names, manifests and quarantine marks of a run, read on demand and remembered."""

    run: Run
    names: dict[str, list[str]]
    quarantined: dict[str, set[Key]]
    _sealed: dict[str, dict[Key, None]] = field(default_factory=dict)
    _standings: dict[str, dict[Key, Standing]] = field(default_factory=dict)
    _by_step: dict[str, dict[int | None, set[int]]] = field(default_factory=dict)
    _manifests: dict[tuple[str, int | None, int], Manifest | None] = field(default_factory=dict)
    _verdicts: dict[tuple[str, int | None, int], Verdict | None] = field(default_factory=dict)
    _names_of: dict[str, dict[Key, list[str]]] = field(default_factory=dict)
    _ever_good: dict[str, set[Key]] = field(default_factory=dict)
    _kept: dict[str, set[Key]] | None = None

    def standings(self, series: str) -> dict[Key, Standing]:
        """The current standing of each generation of a series, by names alone."""
        if series not in self._standings:
            self._standings[series] = standings(self.names.get(series, ()))
        return self._standings[series]

    def sealed(self, series: str) -> KeysView[Key]:
        """(step, generation) of a series' manifests."""
        if series not in self._sealed:
            self._sealed[series] = dict.fromkeys(sealed_generations(self.run, series))
        return self._sealed[series].keys()

    def may_be_kept(self, series: str, key: Key) -> bool:
        """Whether there can be a kept copy, as far as that is known without asking for it."""
        return self._kept is None or key in self._kept.get(series, ())

    def manifest(self, series: str, key: Key) -> Manifest | None:
        """A manifest, or None; one that cannot be read does not exist."""
        full = (series, *key)
        if full not in self._manifests:
            try:
                self._manifests[full] = read_manifest(self.run, series, *key)
            except RecordsError:
                self._manifests[full] = None
        return self._manifests[full]

    def verdict(self, series: str, key: Key) -> Verdict | None:
        """The verdict that counts for a generation; entries that cannot be read do not exist."""
        full = (series, *key)
        if full not in self._verdicts:
            self._verdicts[full] = latest_verdict(self.run, series, *key, self._entries(series).get(key, []))
        return self._verdicts[full]

    def _entries(self, series: str) -> dict[Key, list[str]]:
        """The ledger names of a series by generation."""
        if series not in self._names_of:
            self._names_of[series] = by_generation(self.names.get(series, ()))
        return self._names_of[series]

    def forget_verdicts(self, names: dict[str, list[str]]) -> None:
        """Take over newer ledger names."""
        self.names.update(names)
        self._verdicts.clear()
        self._ever_good.clear()
        self._standings.clear()
        self._by_step.clear()
        self._names_of.clear()

    def generations(self, series: str, step: int | None) -> list[int]:
        """Every generation of a step that any record knows, ascending."""
        if series not in self._by_step:
            by_step: dict[int | None, set[int]] = {}
            for s, generation in (*self.sealed(series), *self.standings(series)):
                by_step.setdefault(s, set()).add(generation)
            self._by_step[series] = by_step
        aside = {generation for s, generation in self.quarantined.get(series, ()) if s == step}
        return sorted(self._by_step[series].get(step, set()) | aside)

    def current(self, series: str, step: int | None, path: str) -> Key | None:
        """The generation whose content should lie in place under `path`: the newest one that was sealed for this
        path and not quarantined, unless a newer one of this path was quarantined. None at first sight.

        RecordsError if a manifest that may be the one cannot be read: what lies there is then not taken for new.
        """
        gone = self.quarantined.get(series, set())
        for generation in reversed(self.generations(series, step)):
            key = (step, generation)
            if key in gone and self._quarantined_path(series, key) in (path, None):
                return None
            if key in gone or key not in self.sealed(series):
                continue
            manifest = self.manifest(series, key)
            if manifest is None:
                raise RecordsError(
                    f"the manifest of {checkpoint_id(*key)} of {series} is damaged: {path} cannot be compared with it",
                    hint="ckptguard reseal, if what lies there is known to be right",
                )
            if manifest.path == path:
                return key
        return None

    def current_if_readable(self, series: str, step: int | None, path: str) -> Key | None:
        """The same where it only is for showing or choosing: None also if a manifest cannot be read."""
        try:
            return self.current(series, step, path)
        except RecordsError:
            return None

    def _quarantined_path(self, series: str, key: Key) -> str | None:
        mark = read_quarantined(self.run, series, *key)
        return mark.path if mark is not None else None

    def next_generation(self, series: str, step: int | None) -> int:
        """The number that the next content of a step gets. A generation with verdicts but no manifest (INCOMPLETE
        so far) is still open and keeps its number."""
        known = self.generations(series, step)
        if not known:
            return 1
        newest = (step, known[-1])
        is_open = newest not in self.sealed(series) and newest not in self.quarantined.get(series, ())
        return known[-1] if is_open else known[-1] + 1

    def was_good(self, series: str, key: Key) -> bool:
        """Whether any verdict of this generation was ever GOOD."""
        if series not in self._ever_good:
            self._ever_good[series] = ever_good(self.names.get(series, ()))
        return key in self._ever_good[series]

    def reference(self, series: str, step: int | None, generation: int) -> tuple[Manifest, Verdict | None] | None:
        """The manifest that a checkpoint's schema must match: the nearest lower-step GOOD of the series, else the
        nearest higher; of a step without number, the newest earlier GOOD generation. An accepted schema counts as
        GOOD, and an accepted checkpoint needs no reference."""
        accepted = accepted_references(self.run, series)
        if (step, generation) in accepted:
            return None
        good = {k for k, s in self.standings(series).items() if s.outcome is Outcome.GOOD} | accepted
        good.discard((step, generation))
        if step is None:
            order = sorted((k for k in good if k[0] is None), key=lambda k: -k[1])
        else:
            numbered = [(s, g) for s, g in good if s is not None]
            lower = sorted((k for k in numbered if k < (step, generation)), reverse=True)
            higher = sorted(k for k in numbered if k > (step, generation))
            order = [*lower, *higher]
        for key in order:
            manifest = self.manifest(series, key)
            if manifest is not None:
                return manifest, self.verdict(series, key)
        return None

    def previous(self, series: str, step: int | None) -> tuple[Manifest, Facts | None] | None:
        """The nearest lower step of the series that training went on from, and what its verdict knows: BAD ones too,
        but none that a rollback put aside. None for a step without number."""
        if step is None:
            return None
        aside = self.quarantined.get(series, set())
        lower = [(s, g) for s, g in self.sealed(series) if s is not None and s < step and (s, g) not in aside]
        for key in sorted(lower, reverse=True):
            manifest = self.manifest(series, key)
            if manifest is not None:
                verdict = self.verdict(series, key)
                return manifest, verdict.facts if verdict is not None and not verdict.place_damaged else None
        return None


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
