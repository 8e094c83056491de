"""What the records say about a run, read once for all operations of a call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, KeysView, Mapping
from itertools import islice, takewhile
from operator import attrgetter

import msgspec

from ckptguard.decisions.known_good import (
    Standing,
    by_generation,
    ever_good,
    parse_verdict_name,
    since,
    standings,
    weightier,
)
from ckptguard.errors import RecordsError
from ckptguard.records.ledger import append_verdict, is_about, latest_verdict, ledger_names, series_names
from ckptguard.records.manifests import manifest_names, read_manifest, sealed_id
from ckptguard.records.names_by_step import ListedSteps, StepRecords
from ckptguard.records.quarantine import quarantined_generations, quarantined_of_series, read_quarantined
from ckptguard.records.run import Run
from ckptguard.runs.file_signatures import late_state
from ckptguard.values.ids import CheckpointId, Step, numbers_of
from ckptguard.values.manifest import Manifest, content_digest
from ckptguard.values.record_formats import VERDICT
from ckptguard.values.verdict import Facts, Outcome, Verdict

_ORDER = attrgetter("order")
_MOST_MANIFESTS = 64  # kept in memory at once: the manifest of a large checkpoint takes about 25 MB


class History(msgspec.Struct):
    """The ledger names, manifests and quarantine marks of a run, each read when first needed.

    `refresh` reads the names of one series again. An outdated history is safe: records are created exclusively, and the
    second writer gets an error.
    """

    run: Run
    names: dict[str, dict[str, None]]
    quarantined: dict[str, set[CheckpointId]]
    _sealed: dict[str, dict[CheckpointId, None]] = {}
    _manifest_names: dict[str, set[str]] = {}
    _standings: dict[str, dict[CheckpointId, Standing]] = {}
    _ordered: dict[str, list[CheckpointId]] = {}
    _manifests: dict[CheckpointId, Manifest | None] = {}
    _verdicts: dict[CheckpointId, Verdict | None] = {}
    _names_of: dict[str, dict[CheckpointId, list[str]]] = {}
    _ever_good: dict[str, set[CheckpointId]] = {}
    _kept: dict[str, set[CheckpointId]] | None = None

    def standings(self, series: str) -> dict[CheckpointId, Standing]:
        """Return the current standing of each generation of a series, by names alone."""
        if series not in self._standings:
            self._standings[series] = standings(series, self.names.get(series, ()))
        return self._standings[series]

    def has_verdict(self, id: CheckpointId) -> bool:
        """True if the ledger has an entry of this generation."""
        return id in self.standings(id.series)

    def sealed(self, series: str) -> KeysView[CheckpointId]:
        """Return the generations of a series that have a manifest."""
        if series not in self._sealed:
            self._sealed[series] = {}
            self._note_manifests(series)
        return self._sealed[series].keys()

    def _note_manifests(self, series: str) -> None:
        names, known = set(manifest_names(self.run, series)), self._manifest_names.get(series, set())
        self._manifest_names[series] = names
        if not known <= names:  # some were deleted, which ckptguard never does: start again
            self._sealed[series] = {}
            self._ordered.pop(series, None)
            known = set()
        for name in names - known:
            id = sealed_id(series, name)
            if id is not None:
                self._sealed[series][id] = None
                self._manifests.pop(id, None)
                self._note_order(id)

    def _note_order(self, id: CheckpointId) -> None:
        ordered = self._ordered.get(id.series)
        if ordered is not None:
            place = bisect_left(ordered, id.order, key=_ORDER)
            if ordered[place : place + 1] != [id]:
                ordered.insert(place, id)

    def is_quarantined(self, id: CheckpointId) -> bool:
        """True if a generation was moved aside."""
        return id in self.quarantined.get(id.series, ())

    def may_be_kept(self, id: CheckpointId) -> bool:
        """True unless it is known that there is no kept copy."""
        return self._kept is None or id in self._kept.get(id.series, ())

    def manifest(self, id: CheckpointId) -> Manifest | None:
        """Return a manifest, or None if it does not exist or cannot be read."""
        if id in self._manifests:
            return self._manifests[id]
        try:
            manifest = read_manifest(self.run, id)
        except RecordsError:
            manifest = None
        self._remember(id, manifest)
        return manifest

    def _remember(self, id: CheckpointId, manifest: Manifest | None) -> None:
        if len(self._manifests) >= _MOST_MANIFESTS:
            del self._manifests[next(iter(self._manifests))]
        self._manifests[id] = manifest

    def verdict(self, id: CheckpointId) -> Verdict | None:
        """Return the verdict that counts for a generation, or None. Entries that cannot be read or that are about other
        content are ignored."""
        if id not in self._verdicts:
            self._verdicts[id] = latest_verdict(self.run, id, self._entries(id.series).get(id, []), self.fits)
        return self._verdicts[id]

    def fits(self, verdict: Verdict) -> bool:
        """True if a verdict of this ledger is about the content that was sealed under its id."""
        manifest = self.manifest(verdict.id) if verdict.manifest else None
        sealed = bool(verdict.manifest) and manifest is None and verdict.id in self.sealed(verdict.series)
        return is_about(verdict, manifest, sealed=sealed)

    def add_verdict(self, verdict: Verdict, *, after: int | None = None) -> None:
        """Append a verdict to the ledger, with the digest of the manifest that it is about. It does not outweigh a
        worse one that others wrote since number `after`."""
        manifest = self.manifest(verdict.id)
        about = content_digest(manifest.files) if manifest is not None else verdict.manifest
        verdict = msgspec.structs.replace(verdict, format=VERDICT.writes, manifest=about)
        self.note_verdict(verdict.series, append_verdict(self.run, verdict, after=after))

    def refresh(self, series: str) -> None:
        """List the record names of one series again: verdicts, manifests and quarantine marks."""
        known = self.names.setdefault(series, {})
        names = series_names(self.run, series, known=known)
        if not known.keys() <= set(names):  # entries were deleted, which ckptguard never does: start again
            self.names[series] = known = {}
            for remembered in (self._standings, self._names_of, self._ever_good, self._ordered):
                remembered.pop(series, None)
            self._verdicts = {id: verdict for id, verdict in self._verdicts.items() if id.series != series}
        for name in names:
            if name not in known:
                self.note_verdict(series, name)
        if series in self._sealed:
            self._note_manifests(series)
        self.quarantined[series] = quarantined_of_series(self.run, series)

    def note_verdict(self, series: str, name: str) -> None:
        """Add one ledger name, such as that of a verdict just written."""
        entry = parse_verdict_name(series, name)
        names = self.names.setdefault(series, {})
        if name in names or entry is None:
            return
        names[name] = None
        self._verdicts.pop(entry.id, None)
        if series in self._standings:
            self._standings[series][entry.id] = weightier(self._standings[series].get(entry.id), entry)
        if series in self._names_of:
            self._names_of[series].setdefault(entry.id, []).append(name)
        if series in self._ever_good and entry.outcome is Outcome.GOOD:
            self._ever_good[series].add(entry.id)
        self._note_order(entry.id)

    def note_manifest(self, manifest: Manifest) -> None:
        """Add one manifest, such as one just written."""
        id = manifest.id
        self._remember(id, manifest)
        if id.series in self._sealed:
            self._sealed[id.series][id] = None
            self._manifest_names.setdefault(id.series, set()).add(f"{id.record_name}.json")
        self._note_order(id)

    def first_of(self, standing: Standing) -> Standing:
        """Return the verdict since which a generation has the outcome of its current standing."""
        names = self._entries(standing.id.series).get(standing.id, [])
        return since(standing.id, names, (standing.outcome,)) or standing

    def _entries(self, series: str) -> dict[CheckpointId, list[str]]:
        """Return the ledger names of a series by generation."""
        if series not in self._names_of:
            self._names_of[series] = by_generation(series, self.names.get(series, ()))
        return self._names_of[series]

    def ordered(self, series: str) -> list[CheckpointId]:
        """Return every generation of a series that has a manifest or a verdict, in the order of training."""
        if series not in self._ordered:
            self._ordered[series] = sorted({*self.sealed(series), *self.standings(series)}, key=_ORDER)
        return self._ordered[series]

    def generations(self, series: str, step: Step) -> list[CheckpointId]:
        """Return every generation of a step that any record mentions, ascending."""
        known = self.ordered(series)
        first = bisect_left(known, CheckpointId(series, step, 0).order, key=_ORDER)
        found = set(takewhile(lambda id: id.step == step, islice(known, first, None)))
        return sorted(found | {id for id in self.quarantined.get(series, ()) if id.step == step}, key=_ORDER)

    def current(
        self, series: str, step: Step, path: str, *, path_of: Callable[[CheckpointId], str | None] | None = None
    ) -> CheckpointId | None:
        """Return the generation whose content should be at `path`, or None if none was sealed there.

        It is the newest that was sealed for this path and not quarantined. None if a newer one of this path was
        quarantined. `path_of` may give the sealed path of a generation without its manifest, and None for an unreadable
        one. RecordsError if a manifest that matters cannot be read: the content then must not count as new.
        """
        for id in reversed(self.generations(series, step)):
            if self.is_quarantined(id):
                mark = read_quarantined(self.run, id)
                if mark is None or mark.path == path:
                    return None
            elif id in self.sealed(series):
                sealed_for = (path_of or self._sealed_path)(id)
                if sealed_for is None:
                    raise RecordsError(
                        f"the manifest of {id} of {series} is damaged: {path} cannot be compared with it",
                        hint="run ckptguard reseal if you know that the files there are right",
                    )
                if sealed_for == path:
                    return id
        return None

    def current_if_readable(
        self, series: str, step: Step, path: str, *, path_of: Callable[[CheckpointId], str | None] | None = None
    ) -> CheckpointId | None:
        """Return the same to show or choose only: None also if a manifest cannot be read."""
        try:
            return self.current(series, step, path, path_of=path_of)
        except RecordsError:
            return None

    def _sealed_path(self, id: CheckpointId) -> str | None:
        manifest = self.manifest(id)
        return manifest.path if manifest is not None else None

    def next_id(self, series: str, step: Step) -> CheckpointId:
        """Return the id for the next content of a step. A generation with verdicts but no manifest is still open."""
        known = self.generations(series, step)
        if not known:
            return CheckpointId(series, step, 1)
        newest = known[-1]
        is_open = newest not in self.sealed(series) and not self.is_quarantined(newest)
        return newest if is_open else CheckpointId(series, step, newest.generation + 1)

    def was_good(self, id: CheckpointId) -> bool:
        """True if any verdict of this generation was ever GOOD."""
        if id.series not in self._ever_good:
            self._ever_good[id.series] = ever_good(id.series, self.names.get(id.series, ()))
        return id in self._ever_good[id.series]

    def reference(self, id: CheckpointId, sizes: Mapping[str, int]) -> tuple[Manifest, Verdict | None] | None:
        """Return the manifest that a checkpoint's schema must match, and its verdict; None if it needs no reference.

        It is the nearest lower GOOD step of the series, else the nearest higher one. A name without a step uses the
        newest earlier GOOD one. An accepted schema counts as GOOD and needs no reference. Earlier checkpoints need not
        match it. By the `sizes` of its files, it is never the same save before files with state were added.
        """
        from ckptguard.records.run_settings import accepted_references  # an answer from the records needs none

        accepted = accepted_references(self.run, id.series)
        if id in accepted:
            return None
        for other in self._nearest(id):
            standing = self.standings(id.series).get(other)
            if other in accepted and other.order > id.order:
                return None
            if other not in accepted and (standing is None or standing.outcome is not Outcome.GOOD):
                continue
            manifest, verdict = self.manifest(other), self.verdict(other)
            if manifest is not None and other.step == id.step and _is_part_of(manifest, sizes):
                continue
            good = verdict is not None and verdict.outcome is Outcome.GOOD
            if manifest is not None and (good or other in accepted):
                return manifest, verdict
        return None

    def _nearest(self, id: CheckpointId) -> Iterator[CheckpointId]:
        """Yield earlier generations, nearest first, then later ones. Earlier ones are of the same kind: a fixed name or
        not."""
        known = self.ordered(id.series)
        place = bisect_left(known, id.order, key=_ORDER)
        yield from (known[n] for n in range(place - 1, -1, -1) if (known[n].step is None) == (id.step is None))
        yield from (other for other in islice(known, place, None) if other != id)

    def previous(self, series: str, step: Step) -> tuple[Manifest, Facts | None] | None:
        """Return the nearest lower step that training continued from, and the facts of its verdict. None for a fixed
        name.

        BAD checkpoints count, but not those that a rollback moved aside.
        """
        if step is None:
            return None
        known = self.ordered(series)
        first = bisect_left(known, ((0,), 0), key=_ORDER)  # skip records of an older version that have no number
        for place in range(bisect_left(known, CheckpointId(series, step, 0).order, key=_ORDER) - 1, first - 1, -1):
            id = known[place]
            went_on = id in self.sealed(series) and not self.is_quarantined(id)
            manifest = self.manifest(id) if went_on else None
            if manifest is not None:
                verdict = self.verdict(id)
                return manifest, verdict.facts if verdict is not None and not verdict.place_damaged else None
        return None

    def following(self, series: str, step: Step, *, read: bool) -> Manifest | None:
        """Return the nearest higher step that was sealed and not moved aside by a rollback.

        Without `read`, only if its manifest is in memory. Steps usually rise, so usually there is none.
        """
        if step is None:
            return None
        known = self.ordered(series)
        for place in range(bisect_left(known, ((*numbers_of(step), -1), 0), key=_ORDER), len(known)):
            id = known[place]
            if id in self.sealed(series) and not self.is_quarantined(id):
                return self.manifest(id) if read else self._manifests.get(id)
        return None


def _is_part_of(manifest: Manifest, sizes: Mapping[str, int]) -> bool:
    """True if files with these sizes are those of a manifest, and others with state."""
    return all(sizes.get(f.path) == f.size for f in manifest.files) and bool(late_state(sizes, manifest))


def histories_by_step(
    run: Run, listed: ListedSteps, series: str, *, before_step: int | None = None
) -> Iterator[History]:
    """Yield the history of each step of a series that has verdicts, newest first. Nothing is read before it is
    needed."""
    for found in listed.below(series, before_step):
        yield _history_of(run, found)


def history_of_step(run: Run, series: str, step: Step, listed: ListedSteps) -> History:
    """Return the history of one step of a series, which may be empty."""
    return _history_of(run, listed.of(series, step))


def _history_of(run: Run, found: StepRecords) -> History:
    return History(
        run=run,
        names={found.series: dict.fromkeys(found.names)},
        quarantined={found.series: set(found.quarantined)},
        _sealed={found.series: dict.fromkeys(found.sealed)},
        _kept={found.series: set(found.kept)},
    )


def load_history(run: Run) -> History:
    """Read the names of the ledger and of the quarantine."""
    names = {series: dict.fromkeys(names) for series, names in ledger_names(run).items()}
    return History(run=run, names=names, quarantined=quarantined_generations(run))


def history_of_series(run: Run, series: str) -> History:
    """Return the history of one series. Its cost does not depend on the others."""
    names, quarantined = dict.fromkeys(series_names(run, series)), quarantined_of_series(run, series)
    return History(run=run, names={series: names}, quarantined={series: quarantined})
