"""What the records of a run say, from one listing of their names."""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter

import msgspec

from ckptguard.decisions.known_good import CurrentVerdict, parse_verdict_name, since, weight
from ckptguard.errors import ObjectMissingError, RecordsError, StorageError
from ckptguard.records.kept import FOLDER as KEPT
from ckptguard.records.ledger import FOLDER as LEDGER
from ckptguard.records.ledger import append_verdict, series_names
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.manifests import manifest_key, read_manifest
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.quarantine import read_quarantined
from ckptguard.records.run import Run, read_record, record_names
from ckptguard.runs.file_signatures import late_state
from ckptguard.runs.sealed_content import sealed_outcome
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import (
    CheckpointId,
    Step,
    numbers_of,
    parse_id,
    record_step,
    series_folder,
    series_from_folder,
)
from ckptguard.values.manifest import Manifest, content_digest
from ckptguard.values.record_formats import VERDICT
from ckptguard.values.verdict import Facts, Outcome, Verdict, decode_verdict

_ORDER, _GENERATION = attrgetter("order"), attrgetter("generation")
_MOST_MANIFESTS = 64  # kept in memory at once: the manifest of a large checkpoint takes about 25 MB
_NONE: set[CheckpointId] = set()  # shared, and never changed
_NO_IDS = {MANIFESTS: _NONE, QUARANTINE: _NONE, KEPT: _NONE}
FOLDERS = (LEDGER, MANIFESTS, QUARANTINE, KEPT)  # whose names count, as <folder>/<series>/<name>
_STEP = re.compile(r"\d{12}(?:-\d{12})*|-")


@dataclass(slots=True, eq=False)  # there may be very many
class StepRecords:
    """What the record names of one step of a series say. `entries` are those of the ledger by generation and name, and
    `was_good` the generations with any verdict GOOD. `ids` are those with a record in one of the other folders."""

    series: str
    entries: dict[CheckpointId, dict[str, CurrentVerdict]] = field(default_factory=dict)
    current_verdicts: dict[CheckpointId, CurrentVerdict] = field(default_factory=dict)
    was_good: set[CheckpointId] = field(default_factory=set)
    ids: dict[str, set[CheckpointId]] = field(default_factory=_NO_IDS.copy)

    def add(self, key: str) -> CheckpointId | None:
        """Add a key. Returns the id that it is about, if it is that of a record."""
        folder, _, name = key.split("/")
        if folder == LEDGER:
            entry = parse_verdict_name(self.series, name)
            if entry is None:
                return None
            self.entries.setdefault(entry.id, {})[name] = entry
            self.current_verdicts[entry.id] = max(self.current_verdicts.get(entry.id, entry), entry, key=weight)
            if entry.outcome is Outcome.GOOD:
                self.was_good.add(entry.id)
            return entry.id
        id = parse_id(self.series, name.removesuffix(".json")) if name.endswith(".json") else None
        if id is not None:
            self.ids[folder] = self.ids[folder] or set()
            self.ids[folder].add(id)
        return id


class History:
    """What the records of a run say, by the keys of one listing. Manifests and verdicts are read when first needed.

    `refresh` lists the names of one series again. An outdated history is safe: records are created exclusively, and the
    second writer gets an error. If the listing had empty entries, too, reading one shows that it does not count.
    """

    def __init__(self, run: Run, keys: Iterable[str] = (), *, has_kept: bool = False) -> None:
        self.run = run
        self.listed: Mapping[str, Entry] = {}  # the records of the listing by their keys, if it had more than names
        self.unread: dict[CheckpointId, StorageError] = {}  # what was asked for, and cannot be looked at in place
        self._has_kept = has_kept  # the keys are those of kept copies, too, and all of it is asked at once
        self._steps: dict[tuple[str, str], StepRecords] = {}  # those that were asked for
        self._sorted: dict[str, list[str]] = {}  # the steps of a series, as in the names
        self._names: dict[tuple[str, str], set[str]] = {}  # by series and folder
        self._ordered: dict[str, list[CheckpointId]] = {}
        self._manifests: dict[CheckpointId, Manifest | None] = {}
        self._verdicts: dict[CheckpointId, tuple[int, Verdict | None]] = {}
        by_folder: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for key in keys:
            parts = key.split("/")
            if len(parts) == 3 and parts[0] in FOLDERS:
                by_folder[parts[1]][parts[2].partition(".")[0]].append(key)
        # By series, and by step as in the names.
        self._keys = {series_from_folder(folder): steps for folder, steps in by_folder.items()}

    @property
    def names(self) -> dict[str, set[str]]:
        """The ledger names of each series that has any."""
        found = {series: self._names_in(series, LEDGER) for series in self._keys}
        return {series: names for series, names in found.items() if names}

    @property
    def quarantined(self) -> dict[str, set[CheckpointId]]:
        """The generations that were moved aside, by series."""
        found = {s: {id for step in self.steps(s) for id in step.ids[QUARANTINE]} for s in self._keys}
        return {series: ids for series, ids in found.items() if ids}

    @property
    def series(self) -> list[str]:
        """Every series with any record, sorted."""
        return sorted(self._keys)

    def _names_in(self, series: str, folder: str) -> set[str]:
        if (series, folder) not in self._names:
            steps, own = self._keys[series].values() if series in self._keys else (), f"{folder}/"
            self._names[series, folder] = {
                key.rpartition("/")[2] for keys in steps for key in keys if key.startswith(own)
            }
        return self._names[series, folder]

    def _at(self, series: str, step: Step | str) -> StepRecords:
        """Return the records of a step, or of one as in the names."""
        text = step if isinstance(step, str) else record_step(step)
        if (series, text) not in self._steps:
            found = self._steps[series, text] = StepRecords(series)
            for key in self._keys[series].get(text, ()) if series in self._keys else ():
                found.add(key)
        return self._steps[series, text]

    def steps(self, series: str, before_step: int | None = None) -> Iterator[StepRecords]:
        """Yield the records of each step of a series, newest first. `before_step` is exclusive, and ignores names
        without a single number."""
        limit = None if before_step is None else record_step(before_step)
        if series not in self._sorted:
            self._sorted[series] = sorted(filter(_STEP.fullmatch, self._keys.get(series, ())))
        for text in self._sorted[series][::-1]:
            if limit is None or not text.isdigit() or text < limit or len(text) < len(limit):
                yield self._at(series, text)

    def current_verdicts(self, series: str) -> dict[CheckpointId, CurrentVerdict]:
        """Return the current standing of each generation of a series, by names alone."""
        oldest_first = reversed(list(self.steps(series)))
        return {id: current_verdict for step in oldest_first for id, current_verdict in step.current_verdicts.items()}

    def current_verdict(self, id: CheckpointId) -> CurrentVerdict | None:
        """Return the current standing of a generation, by names alone."""
        return self._at(id.series, id.step).current_verdicts.get(id)

    def has_verdict(self, id: CheckpointId) -> bool:
        """True if the ledger has an entry of this generation."""
        return self.current_verdict(id) is not None

    def sealed(self, series: str) -> set[CheckpointId]:
        """Return the generations of a series that have a manifest."""
        return {id for step in self.steps(series) for id in step.ids[MANIFESTS]}

    def newest_sealed(self, series: str, step: Step) -> int:
        """Return the newest generation of a step that has a manifest, by names alone; 0 if there is none."""
        return max((id.generation for id in self._at(series, step).ids[MANIFESTS]), default=0)

    def is_sealed(self, id: CheckpointId) -> bool:
        """True if a generation has a manifest."""
        return id in self._at(id.series, id.step).ids[MANIFESTS]

    def is_quarantined(self, id: CheckpointId) -> bool:
        """True if a generation was moved aside."""
        return id in self._at(id.series, id.step).ids[QUARANTINE]

    def may_be_kept(self, id: CheckpointId) -> bool:
        """True unless it is known that there is no kept copy."""
        return not self._has_kept or id in self._at(id.series, id.step).ids[KEPT]

    def manifest(self, id: CheckpointId) -> Manifest | None:
        """Return a manifest, or None if it does not exist or cannot be read."""
        if id not in self._manifests:
            while len(self._manifests) >= _MOST_MANIFESTS:
                del self._manifests[next(iter(self._manifests))]
            try:
                self._manifests[id] = read_manifest(self.run, id)
            except RecordsError:
                self._manifests[id] = None
        return self._manifests[id]

    def forget(self, id: CheckpointId) -> None:
        """Read the manifest and the verdict of a generation again when next needed."""
        self._manifests.pop(id, None)
        self._verdicts.pop(id, None)

    def verdict(self, id: CheckpointId) -> Verdict | None:
        """Return the verdict that counts for a generation, or None. Entries that cannot be read or that are about other
        content are ignored."""
        if id not in self._verdicts:
            entries = self._at(id.series, id.step).entries.get(id, {})
            newest_first = sorted(entries, key=lambda name: weight(entries[name]), reverse=True)
            read = ((entries[name].number, self.entry(entries[name], name)) for name in newest_first)
            self._verdicts[id] = next(((number, found) for number, found in read if found is not None), (0, None))
        return self._verdicts[id][1]

    def judged(self, id: CheckpointId) -> tuple[int, Verdict | None]:
        """Return the same with the number in its name, which is 0 if there is none."""
        verdict = self.verdict(id)
        return self._verdicts[id][0], verdict

    def good_verdict(self, id: CheckpointId) -> Verdict | None:
        """Return the same if the content sealed under this id is good, wherever a whole copy of it is; else None.

        It is GOOD now, or it was GOOD when last seen whole and only the files in place were damaged later. If it was
        thinned, what stayed must be good, too: a suspicion is about the whole one.
        """
        step = self._at(id.series, id.step)
        verdict = self.verdict(id) if id in step.was_good else None
        if verdict is None or sealed_outcome(verdict) is not Outcome.GOOD:
            return None
        return verdict if len(step.ids[MANIFESTS]) < 2 or self._good_since(id, step) else None

    def _good_since(self, id: CheckpointId, step: StepRecords) -> bool:
        """True unless what thinning left of a generation is no longer good."""
        for later, current_verdict in step.current_verdicts.items():
            if later.generation > id.generation and current_verdict.outcome is not Outcome.GOOD:
                manifest, verdict = self.manifest(later), self.verdict(later)
                if manifest is not None and manifest.thinned and verdict is not None:
                    return sealed_outcome(verdict) is Outcome.GOOD
        return True

    def is_good(self, id: CheckpointId) -> bool:
        """True if the content sealed under this id is good, wherever a whole copy of it is."""
        return self.good_verdict(id) is not None

    def entry(self, current_verdict: CurrentVerdict, name: str) -> Verdict | None:
        """Return the verdict with this name in the ledger, which says this. None if it is empty, cannot be read, or is
        about other content than what was sealed under its id: it was copied from another run.

        A verdict of an older version does not say what it is about. With a manifest that cannot be read, any fits.
        """
        id = current_verdict.id
        text = read_record(self.run, f"{LEDGER}/{series_folder(id.series)}/{name}")
        try:
            verdict = decode_verdict(text) if text else None
        except RecordsError:
            return None
        said = None if verdict is None else (verdict.step, verdict.generation, verdict.outcome)
        if verdict is None or said != (id.step, id.generation, current_verdict.outcome):
            return None
        manifest = self.manifest(id) if verdict.manifest else None
        if manifest is None:
            return verdict if not verdict.manifest or self.is_sealed(id) else None
        return verdict if content_digest(manifest.files) == verdict.manifest else None

    def add_verdict(self, verdict: Verdict, *, after: int | None = None) -> None:
        """Append a verdict to the ledger, with the digest of the manifest that it is about. It does not outweigh a
        worse one that others wrote since number `after`."""
        manifest = self.manifest(verdict.id)
        about = content_digest(manifest.files) if manifest is not None else verdict.manifest
        verdict = msgspec.structs.replace(verdict, format=VERDICT.writes, manifest=about)
        self.note_verdict(verdict.series, append_verdict(self.run, verdict, after=after))

    def refresh(self, series: str) -> None:
        """List the record names of one series again: verdicts, manifests and quarantine marks."""
        known = {folder: self._names_in(series, folder) for folder in (LEDGER, MANIFESTS, QUARANTINE)}
        listed = {LEDGER: series_names(self.run, series, known=known[LEDGER])}
        listed |= {top: record_names(self.run, f"{top}/{series_folder(series)}") for top in (MANIFESTS, QUARANTINE)}
        if any(not known[folder] <= set(listed[folder]) for folder in listed):  # some were removed: start again
            listed[KEPT] = list(self._names_in(series, KEPT))
            del self._keys[series]
            self._sorted.pop(series, None)
            self._names = {of: names for of, names in self._names.items() if of[0] != series}
            self._steps = {at: step for at, step in self._steps.items() if at[0] != series}
            self._ordered.pop(series, None)
            self._manifests = {id: found for id, found in self._manifests.items() if id.series != series}
            self._verdicts = {id: found for id, found in self._verdicts.items() if id.series != series}
            known = {folder: set() for folder in FOLDERS}
        for folder, names in listed.items():
            for name in [name for name in names if name not in known[folder] and "/" not in name]:
                self._add(series, folder, name)

    def _add(self, series: str, folder: str, name: str) -> None:
        key, text = f"{folder}/{series_folder(series)}/{name}", name.partition(".")[0]
        steps = self._keys.setdefault(series, defaultdict(list))
        if key in steps[text]:
            return
        if not steps[text] and series in self._sorted and _STEP.fullmatch(text):
            insort(self._sorted[series], text)
        steps[text].append(key)
        if (series, folder) in self._names:
            self._names[series, folder].add(name)
        step = self._steps.get((series, text))
        id = (step or StepRecords(series)).add(key)
        if id is None:
            return
        self._verdicts.pop(id, None)
        if folder == MANIFESTS and self._manifests.get(id, key) is None:
            del self._manifests[id]  # it was not there when it was asked for
        ordered = self._ordered.get(series)
        if ordered is not None and folder in (LEDGER, MANIFESTS):
            place = bisect_left(ordered, id.order, key=_ORDER)
            if ordered[place : place + 1] != [id]:
                ordered.insert(place, id)

    def note_verdict(self, series: str, name: str) -> None:
        """Add one ledger name, such as that of a verdict just written."""
        self._add(series, LEDGER, name)

    def note_quarantined(self, id: CheckpointId) -> None:
        """Add one quarantine mark, such as one just written."""
        self._add(id.series, QUARANTINE, f"{id.record_name}.json")

    def note_manifest(self, manifest: Manifest) -> None:
        """Add one manifest, such as one just written."""
        self._add(manifest.series, MANIFESTS, f"{manifest.id.record_name}.json")
        self._manifests[manifest.id] = manifest
        while len(self._manifests) > _MOST_MANIFESTS:
            del self._manifests[next(iter(self._manifests))]

    def first_of(self, current_verdict: CurrentVerdict) -> CurrentVerdict:
        """Return the verdict since which a generation has the outcome of its current standing."""
        id = current_verdict.id
        return since(id, self.entries(id), (current_verdict.outcome,)) or current_verdict

    def entries(self, id: CheckpointId) -> Mapping[str, CurrentVerdict]:
        """Return what the ledger names of a generation say, by name."""
        return self._at(id.series, id.step).entries.get(id, {})

    def keys(self, id: CheckpointId) -> list[str]:
        """Return the keys of what a generation was sealed and judged as."""
        found = [f"{LEDGER}/{series_folder(id.series)}/{name}" for name in self.entries(id)]
        return [*found, manifest_key(id)] if self.is_sealed(id) else found

    def ordered(self, series: str) -> list[CheckpointId]:
        """Return every generation of a series that has a manifest or a verdict, in the order of training."""
        if series not in self._ordered:
            every = {id for step in self.steps(series) for id in (*step.current_verdicts, *step.ids[MANIFESTS])}
            self._ordered[series] = sorted(every, key=_ORDER)
        return self._ordered[series]

    def generations(self, series: str, step: Step) -> list[CheckpointId]:
        """Return every generation of a step that has a manifest, a verdict or a quarantine mark, ascending."""
        found = self._at(series, step)
        return sorted({*found.current_verdicts, *found.ids[MANIFESTS], *found.ids[QUARANTINE]}, key=_GENERATION)

    def current(
        self, series: str, step: Step, path: str, *, path_of: Callable[[CheckpointId], str | None] | None = None
    ) -> CheckpointId | None:
        """Return the generation whose content should be at `path`, or None if none was sealed there.

        It is the newest that was sealed for this path and not quarantined. None if a newer one of this path was
        quarantined. `path_of` may give the sealed path of a generation without its manifest, and None for an unreadable
        one. RecordsError if a manifest that matters cannot be read: the content then must not count as new.
        """
        ids = self._at(series, step).ids
        for id in sorted(ids[MANIFESTS] | ids[QUARANTINE], key=_GENERATION, reverse=True):
            if id in ids[QUARANTINE]:
                mark = read_quarantined(self.run, id)
                if mark is None or mark.path == path:
                    return None
                continue
            if path_of is not None:
                sealed_for = path_of(id)
            else:
                manifest = self.manifest(id)
                sealed_for = manifest.path if manifest is not None else None
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

    def next_id(self, series: str, step: Step) -> CheckpointId:
        """Return the id for the next content of a step. A generation with verdicts but no manifest is still open."""
        known = self.generations(series, step)
        if not known:
            return CheckpointId(series, step, 1)
        newest = known[-1]
        is_open = not self.is_sealed(newest) and not self.is_quarantined(newest)
        return newest if is_open else CheckpointId(series, step, newest.generation + 1)

    def was_good(self, id: CheckpointId) -> bool:
        """True if any verdict of this generation was ever GOOD."""
        return id in self._at(id.series, id.step).was_good

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
        known = self.ordered(id.series)
        place = bisect_left(known, id.order, key=_ORDER)
        # The nearest first. Earlier ones are of the same kind: a fixed name or not.
        earlier = (known[n] for n in range(place - 1, -1, -1) if (known[n].step is None) == (id.step is None))
        for other in chain(earlier, (other for other in islice(known, place, None) if other != id)):
            current_verdict = self.current_verdict(other)
            if other in accepted and other.order > id.order:
                return None
            if other not in accepted and (current_verdict is None or current_verdict.outcome is not Outcome.GOOD):
                continue
            manifest, verdict = self.manifest(other), self.verdict(other)
            if manifest is not None and other.step == id.step and _is_part_of(manifest, sizes):
                continue
            if manifest is not None and manifest.thinned:  # the whole one is on record before it
                continue
            good = verdict is not None and verdict.outcome is Outcome.GOOD
            if manifest is not None and (good or other in accepted):
                return manifest, verdict
        return None

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
            went_on = self.is_sealed(id) and not self.is_quarantined(id)
            manifest = self.manifest(id) if went_on else None
            if manifest is not None and not manifest.thinned:
                verdict = self.verdict(id)
                return manifest, verdict.facts if verdict is not None and not verdict.place_damaged else None
        return None

    def good_before(self, id: CheckpointId, most: int) -> tuple[Manifest, ...]:
        """Return the manifests of the nearest good saves before a generation, the newest first: one of each lower step,
        or the earlier contents of a fixed name."""
        known, found = self.ordered(id.series), dict[object, Manifest]()
        for other in reversed(known[: bisect_left(known, id.order, key=_ORDER)]):
            known_verdict, fixed = self.current_verdict(other), id.step is None
            is_good = known_verdict is not None and known_verdict.outcome is Outcome.GOOD
            is_good = is_good and not self.is_quarantined(other)
            place = other.generation if fixed else other.step
            if is_good and (other.step is None) == fixed and (fixed or place != id.step) and place not in found:
                manifest = self.manifest(other)
                if manifest is not None and not manifest.thinned:
                    found[place] = manifest
            if len(found) == most:
                break
        return tuple(found.values())

    def following(self, series: str, step: Step, *, read: bool) -> Manifest | None:
        """Return the nearest higher step that was sealed and not moved aside by a rollback.

        Without `read`, only if its manifest is in memory. Steps usually rise, so usually there is none.
        """
        if step is None:
            return None
        known = self.ordered(series)
        for place in range(bisect_left(known, ((*numbers_of(step), -1), 0), key=_ORDER), len(known)):
            id = known[place]
            if self.is_sealed(id) and not self.is_quarantined(id):
                return self.manifest(id) if read else self._manifests.get(id)
        return None


def _is_part_of(manifest: Manifest, sizes: Mapping[str, int]) -> bool:
    """True if files with these sizes are those of a manifest, and others with state."""
    return all(sizes.get(f.path) == f.size for f in manifest.files) and bool(late_state(sizes, manifest))


def load_history(run: Run) -> History:
    """List the names of the records. Empty entries of the ledger do not count."""
    try:
        entries = run.records.list("", recursive=True, enter=_has_names)
    except ObjectMissingError:
        entries = []
    listed = {e.key: e for e in entries if e.kind == "file" and (e.size or not e.key.startswith(f"{LEDGER}/"))}
    history = History(run, listed)
    history.listed = listed
    return history


def names_alone(run: Run) -> History:
    """Return the history by a listing of names alone: the cheapest, and enough to choose among very many."""
    return History(run, record_names(run, ""), has_kept=True)


def history_of_series(run: Run, series: str) -> History:
    """Return the history of one series. Its cost does not depend on the others."""
    history = History(run)
    history.refresh(series)
    return history


def _has_names(folder: str) -> bool:
    top, _, series = folder.partition("/")
    return top in (LEDGER, MANIFESTS, QUARANTINE) and "/" not in series
