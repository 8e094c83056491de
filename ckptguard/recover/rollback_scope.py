"""Collect what a rollback must consider: the series of the training that owns the known-good checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckptguard.checks.order import named_counters
from ckptguard.decisions.known_good import NUMBER_IN_NAME, kind_of_name, series_head_of
from ckptguard.decisions.moments import twins_of
from ckptguard.decisions.names import read_names
from ckptguard.decisions.rollback_plan import Content, SeriesNow, folders_of_training, is_newer, next_save
from ckptguard.layouts import Checkpoint
from ckptguard.layouts.discovery import FINAL_SERIES
from ckptguard.records.quarantine import read_quarantined
from ckptguard.runs.find_known_good import ANY, SURE, Candidate, Wanted, candidate_of, known_good_candidates
from ckptguard.runs.history import History
from ckptguard.runs.pointers import pointers_in
from ckptguard.runs.run_view import RunView
from ckptguard.runs.saved_together import RecordedSaves, answers, groups_in, series_seen
from ckptguard.values.ids import CheckpointId, folder_of, numbers_of
from ckptguard.values.manifest import Manifest


class FreshStart(Struct, frozen=True, kw_only=True):
    """What a training has written that began from scratch: the contents at `paths`, and every content by its id, also
    those that it has saved over. What it has saved `again` holds the good bytes that lay there before."""

    paths: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()
    ids: frozenset[CheckpointId] = frozenset()


NO_FRESH_START = FreshStart()


def content_of(candidate: Candidate, numbers: Mapping[str, tuple[int, ...]] = {}) -> Content:
    """Describe a known-good checkpoint for a plan. `numbers` are those in paths, where ids do not say them."""
    return _content(candidate.manifest, good=True, in_place=candidate.in_place, numbers=numbers)


def content_lying(view: RunView, checkpoint: Checkpoint, numbers: Mapping[str, tuple[int, ...]] = {}) -> Content:
    """Describe the content in place, good or not: as it was sealed, else by its name and times."""
    id = view.current_if_readable(checkpoint)
    manifest = view.history.manifest(id) if id is not None else None
    if manifest is not None:
        return _content(manifest, good=False, in_place=True, numbers=numbers)
    counters = {c.kind: c.value for c in named_counters(checkpoint.path)}
    id = id or view.history.next_id(checkpoint.series, checkpoint.step)
    counters |= _number_in_name(id, checkpoint.path, numbers)
    saved_at = max((e.mtime_ns for e in checkpoint.entries if e.mtime_ns is not None), default=None)
    return Content(
        id=id,
        path=checkpoint.path,
        in_place=True,
        good=False,
        counters=counters,
        saved_at=saved_at,
        number=numbers.get(checkpoint.path, ()),
    )


def training_in(view: RunView, folder: str) -> frozenset[str]:
    """Return all folders of the training that saves into `folder`, also those that an interrupted rollback emptied."""
    lying = {c.series for c in view.checkpoints}
    return folders_of_training(folder, lying | set(view.history.quarantined))


class RollbackScope:
    """The training of a known-good checkpoint, and the `pointers` in its folders.

    `alone`: it has only its own series. `only`: it has these series. `refused` ones are no longer good. What began
    `anew` is never gone back to. `candidates` are the good ones found, by id.
    """

    def __init__(
        self,
        view: RunView,
        chosen: Candidate,
        *,
        alone: bool,
        refused: frozenset[CheckpointId],
        only: Collection[str] | None = None,
        anew: FreshStart = NO_FRESH_START,
    ) -> None:
        self._view, self._anew, self._refused = view, anew, refused | anew.ids
        own = chosen.id.series
        self.folders = frozenset((folder_of(own),)) if alone else training_in(view, folder_of(own))
        self.pointers = [replace(p, anew=p.names in anew.again) for p in pointers_in(view, self.folders)]
        self._named = {pointer.names for pointer in self.pointers}
        self._lying: dict[str, list[Checkpoint]] = {own: []}
        for checkpoint in view.checkpoints:
            meant = checkpoint.series == own if alone else only is None or checkpoint.series in only
            if meant and folder_of(checkpoint.path) in self.folders and not self._is_export(checkpoint, chosen):
                self._lying.setdefault(checkpoint.series, []).append(checkpoint)
        self._numbers = _numbers_in_names(view.history, self._lying)
        self.known_good = self._content_of(chosen)
        self.candidates = {part.id: part for part in chosen.save} | {chosen.id: chosen}
        self._targets = {part.id.series: self._content_of(part) for part in chosen.save}
        self._targets[own] = self.known_good
        self._following: int | None = None  # only other series use it
        self._mixed: set[str] = set()  # series of which only a whole save may be put back, and there is none
        missing = () if alone else self._names_moved_aside()
        self._missing = {name: path for name, path in missing if only is None or name in only}
        first = self._series(own, None)
        self._following = next_save(self.known_good, [first])
        others = sorted({*self._lying, *self._missing} - {own})
        if not alone:
            self._find_other_saves(others)
        self.series = (first, *(self._series(name, self._missing.get(name)) for name in others))

    def twins(self) -> list[tuple[str, str]]:
        """Return the pairs of series that may be of two trainings."""
        source = RecordedSaves(self._view.history, ANY, every_copy=True)
        seen = [found for one in self.series if (found := series_seen(source, one.name)) is not None]
        return twins_of(seen, self._view.run.saves)

    def _is_export(self, checkpoint: Checkpoint, chosen: Candidate) -> bool:
        """True for a good model at the root, or one named ``final``, that no training resumes from."""
        series, own = checkpoint.series, chosen.id.series
        is_final = series == FINAL_SERIES or kind_of_name(series) == "final"
        if series == own or not is_final or checkpoint.path in self._anew.paths:
            return False
        id = self._view.current_if_readable(checkpoint)
        manifest = self._view.history.manifest(id) if id is not None and self._view.is_good(id) else None
        return manifest is not None and not series_head_of(manifest).has_optimizer

    def _find_other_saves(self, names: Iterable[str]) -> None:
        """Find what the other series that are saved together go back to: their newest whole save that is not newer."""
        source = RecordedSaves(self._view.history, Wanted(exclude=self._refused), every_copy=True)
        for group in groups_in(source, names):
            if len(group.series) == 1 or not group.names.isdisjoint(self._targets):
                continue
            for found, _ in answers(source, group):
                contents = [self._content_of(part) for part in found.save]
                if not any(self.is_newer(content) for content in contents):
                    self._targets |= {content.id.series: content for content in contents}
                    self.candidates |= {part.id: part for part in found.save}
                    break
            else:
                self._mixed |= group.names

    def _names_moved_aside(self) -> Iterator[tuple[str, str]]:
        """Yield fixed names that are empty because their content was quarantined by an interrupted rollback."""
        history = self._view.history
        for series in history.quarantined:
            if folder_of(series) not in self.folders or series in self._lying:
                continue
            newest = next(reversed(history.generations(series, None)), None)
            mark = read_quarantined(history.run, newest) if newest and history.is_quarantined(newest) else None
            if mark is not None:
                yield series, mark.path

    def _series(self, name: str, missing: str | None) -> SeriesNow:
        history = self._view.history
        lying = sorted(self._lying.get(name, ()), key=lambda c: numbers_of(c.step), reverse=True)
        good = () if name in self._mixed else tuple(self._good(name))
        found = tuple(self._lies(c, good) for c in lying if self._counts(c, good))
        fixed = next((c.path for c in lying if c.step is None), missing)
        if name == self.known_good.id.series and self.known_good.id.step is None:
            fixed = self.known_good.path
        if len(lying) > 1 or fixed in self._numbers:  # not one fixed name: best_0.35.pt, best_0.41.pt
            fixed = None
        before = history.sealed(name) - self._anew.ids
        sealed = fixed is not None and max(before, key=lambda id: id.order, default=None)
        last = history.manifest(sealed) if sealed else None
        return SeriesNow(
            name=name,
            fixed=fixed,
            lying=found,
            good=good,
            ever_good=any(history.was_good(id) for id in history.current_verdicts(name).keys() - self._anew.ids),
            last=None if last is None else _content(last, good=False, in_place=False),
            target=self._targets.get(name) if name != self.known_good.id.series else None,
        )

    def _counts(self, checkpoint: Checkpoint, good: tuple[Content, ...]) -> bool:
        """True if it may have to be moved, or a pointer to it rewritten. A number lower than its series' target
        stays."""
        target = self._targets.get(checkpoint.series) or next((c for c in good if not self.is_newer(c)), None)
        if checkpoint.path in self._named or checkpoint.path in self._anew.paths:
            return True
        return target is None or numbers_of(checkpoint.step) >= numbers_of(target.id.step)

    def _content_of(self, candidate: Candidate) -> Content:
        content = content_of(candidate, self._numbers)
        return replace(content, in_place=False) if content.path in self._anew.paths else content

    def _lies(self, checkpoint: Checkpoint, good: tuple[Content, ...]) -> Content:
        if checkpoint.path in self._anew.paths:
            return replace(content_lying(self._view, checkpoint, self._numbers), anew=True)
        id = self._view.current_if_readable(checkpoint)
        known = next((c for c in good if c.id == id and c.in_place and c.path == checkpoint.path), None)
        if known is None and id is not None and id not in self._refused and checkpoint.path in self._named:
            older = candidate_of(self._view.history, id, SURE)
            known = self._content_of(older) if older is not None and older.in_place else None
        return known or content_lying(self._view, checkpoint, self._numbers)

    def _good(self, series: str) -> Iterator[Content]:
        """Yield the known-good ones, newest first, down to the first that is not newer."""
        for candidate in known_good_candidates(self._view, Wanted(series=series, exclude=self._refused)):
            content = self._content_of(candidate)
            self.candidates.setdefault(candidate.id, candidate)
            yield content
            if not self.is_newer(content):
                return

    def is_newer(self, content: Content) -> bool:
        """True if a content was saved after the moment that is gone back to."""
        target = self._targets.get(content.id.series)
        if target is not None:
            return content.order > target.order
        return is_newer(content, self.known_good, self._following)


def _numbers_in_names(history: History, lying: Mapping[str, Sequence[Checkpoint]]) -> dict[str, tuple[int, ...]]:
    """Return the numbers that count in paths whose ids do not say them. All names in place and on record say it
    together."""
    numbered = {name: own for name, own in lying.items() if "#" in name.rpartition("/")[2]}
    unread = [name for name, own in numbered.items() if any(c.step is None for c in own)]
    if not unread:
        return {}
    paths = {c.path: c.step is None and c.series in unread for own in lying.values() for c in own}
    for name in unread:
        sealed = (history.manifest(id) for id in history.sealed(name) if id.step is None)
        paths |= {manifest.path: True for manifest in sealed if manifest is not None}
    readings = read_names(sorted(paths))
    return {path: readings[path].order for path, wanted in paths.items() if wanted and readings[path].order}


def _number_in_name(id: CheckpointId, path: str, numbers: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the number that counts in a name: as its id says it, else as `numbers` do, else as its path is read alone
    (``model000010``)."""
    number = id.number
    if id.step is None and "#" in id.series.rpartition("/")[2]:
        number = numbers[path][-1] if path in numbers else read_names([path])[path].step
    return {} if number is None else {NUMBER_IN_NAME: number}


def _content(manifest: Manifest, *, good: bool, in_place: bool, numbers: Mapping[str, tuple[int, ...]] = {}) -> Content:
    stands = series_head_of(manifest)
    return Content(
        id=manifest.id,
        path=manifest.path,
        in_place=in_place,
        good=good,
        counters={**_number_in_name(manifest.id, manifest.path, numbers), **stands.counters},
        has_optimizer=stands.has_optimizer,
        saved_at=stands.saved_at,
        shape=_shape(manifest),
        files=tuple(f.path for f in manifest.files) if any(f.path == manifest.path for f in manifest.files) else (),
        number=numbers.get(manifest.path, ()),
    )


def _shape(manifest: Manifest) -> Hashable:
    """Return what two checkpoints must share so that each can replace the other: file names, and the names, types,
    shapes and roles of their tensors. None with a file beside it, or without tensors."""
    files = []
    for file in manifest.files:
        if file.path != manifest.path and not file.path.startswith(manifest.path + "/"):
            return None
        tensors = tuple(sorted((t.name, t.dtype, t.shape, t.role) for t in file.tensors))
        files.append((file.path[len(manifest.path) :], file.format, tensors))
    return tuple(sorted(files)) if any(tensors for _, _, tensors in files) else None
