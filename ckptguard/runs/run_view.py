"""One run as one call sees it: its listing, records and settings are read once and shared."""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import msgspec

from ckptguard.decisions.fleet_health import newest_saves
from ckptguard.errors import NotFoundError, RecordsError
from ckptguard.formats import tensor_suffix
from ckptguard.formats.table import is_sum_list, suffixes_of
from ckptguard.layouts import LAYOUTS, Checkpoint, enter, find_checkpoints, step_from_name
from ckptguard.layouts.step_names import may_be_of_rank
from ckptguard.records.kept import KeptCopy, kept_of_series, read_kept
from ckptguard.records.ledger import FOLDER as LEDGER
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.manifests import read_manifest, sealed_generations
from ckptguard.records.quarantine import FOLDER as QUARANTINE
from ckptguard.records.run import Run, list_records, open_run
from ckptguard.runs.history import History, history_of_series, load_history
from ckptguard.runs.not_understood import SMALLEST, NotUnderstood, find_not_understood, state_files
from ckptguard.runs.run_reader import RunMemory, RunReader
from ckptguard.runs.sealed_content import is_untouched
from ckptguard.storage.protocol import UNNAMED, Entry, find_entry
from ckptguard.values.ids import (
    CheckpointId,
    Step,
    escape,
    folder_of,
    parse_id,
    series_folder,
    series_from_folder,
    series_of,
    whole_number,
)
from ckptguard.values.manifest import Manifest
from ckptguard.values.patterns import choose
from ckptguard.values.settings import Settings

_KEY, _ORDER = attrgetter("key"), attrgetter("order")
_MOST_NOTED, _MOST_LOST = 20, 64  # places that nobody can look at; steps of each series below one


@dataclass(eq=False)
class RunView:
    """One run, for one call, in one thread. Files and record names are listed when first needed, and remembered.

    Only `look_again`, `refresh` and `forget` read again. An outdated view is safe: records are created exclusively, and
    the second writer gets BusyError.
    """

    run: Run
    settings: Settings
    memory: RunMemory | None = None  # of a caller that looks again and again
    _reader: RunReader | None = None
    _listing: Listing | None = None
    _near: Listing | None = None  # of one checkpoint only
    _history: History | None = None
    _all_is_new: bool = False  # the last `look_again` listed everything

    @property
    def listing(self) -> Listing:
        """The run's files. Raises StorageError if they cannot be listed."""
        if self._listing is None:
            self._listing = list_run(self.run)
        return self._listing

    def take_listed(self, entries: Sequence[Entry]) -> None:
        """Use a listing of the run that the caller has just made."""
        self._listing = Listing(self.run, entries)

    def list_near(self, path: str) -> None:
        """List only what one checkpoint consists of and what lies beside it: enough to verify it."""
        self._listing = list_near(self.run, (path,))

    def list_after(self, before: Listing | None) -> Listing:
        """List the run now, and return `before` if nothing differs from it. Raises StorageError."""
        self._listing = list_run(self.run, before)
        return self._listing

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every entry of the run except records and temporaries, sorted by key."""
        return self.listing.entries

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The checkpoints in place, sorted by path."""
        return tuple(self.listing.checkpoints.values())

    @property
    def history(self) -> History:
        """What the records say."""
        if self._history is None:
            self._history = load_history(self.run)
        return self._history

    @property
    def reader(self) -> RunReader:
        """What the records say about each checkpoint. What the view's memory has is not read again."""
        if self._reader is None or self._reader.history is not self.history:
            self._reader = RunReader(self.history, RunMemory() if self.memory is None else self.memory)
        return self._reader

    def checkpoint(self, path: str) -> Checkpoint | None:
        """Return the listed checkpoint with exactly this path, or None."""
        return self.listing.checkpoints.get(path)

    def look_again(self, path: str) -> Checkpoint | None:
        """List only this checkpoint's entries again, and return it as it is now, or None."""
        if self._listing is None and (found := self._look_near(path)) is not None:
            return found
        parent = path.rpartition("/")[0]
        self._all_is_new = self.run.storage.renew(*(() if path == "." else (path,)), beside=parent)
        self._listing = self.listing.again(path)
        return self._listing.checkpoints.get(path)

    def holding(self, path: str) -> Checkpoint | None:
        """Return the checkpoint that has this path, or a file with it. On a disk usually only this one is listed."""
        parts = path.split("/")
        for place in ("/".join(parts[:depth]) for depth in range(len(parts), 0, -1)):
            found = self._look_near(place) if self._listing is None else None
            if found is not None and (place == path or path in found.files):
                return found
        return next((c for c in self.checkpoints if path == c.path or path in c.files), None)

    def sum_lists_beside(self, checkpoint: Checkpoint) -> Sequence[Entry]:
        """Return the files with checksums that lie beside a checkpoint without a folder of its own."""
        if checkpoint.path != "." and checkpoint.path not in checkpoint.files:
            return ()
        near = self._near if self._listing is None else None
        known = near if near is not None and checkpoint.path in near.checkpoints else self.listing
        return known.sum_lists.get(checkpoint.path.rpartition("/")[0], ())

    def _look_near(self, path: str) -> Checkpoint | None:
        """Return a checkpoint from a listing of its own folder and that of one sealed neighbour.

        All folders of a series together decide how they are read. So None, unless the neighbour was sealed under the
        layout that this one has. Files at the run's top are read alone. None on an object store, where a listing of
        everything costs less.
        """
        if self.run.storage.root is None:
            return None
        neighbour = self._sealed_neighbour(path)
        self._near = list_near(self.run, (path, neighbour.path) if neighbour is not None else (path,))
        found = self._near.checkpoints.get(path)
        alone = found is not None and "/" not in path and (path == "." or path in found.files)
        confirmed = found is not None and neighbour is not None and found.layout == neighbour.layout
        return found if alone or confirmed else None

    def _sealed_neighbour(self, path: str) -> Manifest | None:
        """Return the manifest of the nearest step of a path's series, if possible one before it, or of this one."""
        if path == ".":
            return None
        series = series_of(path)
        known = sorted(self.history.sealed(series), key=_ORDER)
        step = step_from_name(path.rpartition("/")[2])
        place = bisect_left(known, CheckpointId(series, step, 0).order, key=_ORDER)
        near = known[place - 1 : place] if place else known[:1]
        return self.history.manifest(near[0]) if near else None

    def refresh(self, series: str | None = None, *, just_listed: bool = False) -> None:
        """Read the record names of one series again, or of all when next needed.

        `just_listed`: the caller called `look_again` a moment ago, or has read nothing since the run was listed. So on
        an object store the same listing will do.
        """
        if series is None:
            self._history = None
            if not just_listed:
                self.run.records.renew()
        elif self._history is not None:
            folder = series_folder(series)
            if not (just_listed and self._all_is_new):
                self.run.records.renew(*(f"{top}/{folder}" for top in (LEDGER, MANIFESTS)))
            self._history.refresh(series)

    def forget(self) -> None:
        """List files and records again when next needed. Call it after many files were moved."""
        self._listing = self._near = None
        self._history = None

    def current(self, checkpoint: Checkpoint) -> CheckpointId | None:
        """Return the generation whose content should be at a checkpoint's path; see `History.current`."""
        return self.history.current(checkpoint.series, checkpoint.step, checkpoint.path)

    def current_if_readable(self, checkpoint: Checkpoint) -> CheckpointId | None:
        """Return the same; None also if a manifest cannot be read."""
        return self.history.current_if_readable(checkpoint.series, checkpoint.step, checkpoint.path)

    def new_id(self, checkpoint: Checkpoint) -> CheckpointId:
        """Return the generation for content that is not sealed yet. A kept copy of these files already has one.

        Earlier contents of this path that wait as copies keep their own ids: a verdict on the new content says nothing
        about them. A copy that may not be whole is of this save, before it was finished, if a file with state is still
        there as it was copied, or if the copy was overwritten, too.
        """
        id = self.history.next_id(checkpoint.series, checkpoint.step)
        for copy in self.waiting_copies(checkpoint.series):
            if (copy.step, copy.path) == (id.step, checkpoint.path) and copy.generation >= id.generation:
                if copy.lies_in(checkpoint.entries):
                    return copy.id
                if copy.whole or self._is_of_earlier_save(copy, checkpoint):
                    return CheckpointId(id.series, id.step, copy.generation + 1)
        return id

    def _is_of_earlier_save(self, copy: KeptCopy, checkpoint: Checkpoint) -> bool:
        there = {entry.key: entry.signature for entry in checkpoint.entries if tensor_suffix(entry.key)}
        left = any(there.get(file) == source for file, source in zip(copy.files, copy.sources, strict=False))
        return not left and is_untouched(self.run, copy, copy.sizes)

    def content_id(self, checkpoint: Checkpoint) -> CheckpointId:
        """Return the generation of the current content, whether it is sealed or waits for its verdict."""
        current = self.current_if_readable(checkpoint)
        copies = self.waiting_copies(checkpoint.series) if current is not None else []
        here = (c.id for c in copies if c.path == checkpoint.path and c.lies_in(checkpoint.entries))
        return next(here, current) or self.new_id(checkpoint)

    def waiting_copies(self, series: str) -> list[KeptCopy]:
        """Return the kept copies of a series that have no verdict, newest first."""
        ids = [id for id in kept_of_series(self.run, series) if not self.history.has_verdict(id)]
        copies = (read_kept(self.run, id) for id in sorted(ids, key=lambda id: id.order, reverse=True))
        return [copy for copy in copies if copy is not None]

    def is_good(self, id: CheckpointId) -> bool:
        """True if the content sealed under this id is good, wherever a whole copy of it is."""
        return self.history.is_good(id)


def open_view(url: str, settings: Settings, *, must_exist: bool = True) -> RunView:
    """Open a run and return a view of it. Raises the errors of `open_run`."""
    return RunView(open_run(url, settings, must_exist=must_exist), settings)


class SeriesInPlace(NamedTuple):
    """The checkpoints of one series in place, sorted by path.

    `bytes` is the size of all, `largest` that of the largest. `saved_at`: when the newest ones were written, in seconds
    since 1970.
    """

    checkpoints: tuple[Checkpoint, ...]
    bytes: int
    largest: int
    saved_at: tuple[float, ...]


class Listing:
    """A run's `entries`, sorted by key, and its `checkpoints` by path.

    A sealed folder counts as a checkpoint even if its weights are gone and no layout recognises it.
    """

    def __init__(self, run: Run, entries: Iterable[Entry]) -> None:
        self._run = run
        self.entries = tuple(sorted(entries, key=_KEY))
        known = suffixes_of("tensors", "arrays", "objects", "pieces")
        odd = [e for e in self.entries if e.kind == "file" and not e.name.endswith(known)]
        large = [e for e in odd if e.size > SMALLEST]
        # What was sealed under such a name is a checkpoint, whatever its bytes are now.
        sealed = {series_from_folder(folder) for folder in list_records(run, MANIFESTS)}
        by_bytes = {e.key for e in odd if series_of(e.key) in sealed} if sealed else set()
        by_bytes.update(state_files(run, large) if large else ())
        ranks = {series_of(e.key) for e in self.entries if e.kind == "file" and may_be_of_rank(e.name)}
        # What was sealed with a step as files of ranks is always read so, whatever lies beside it.
        by_rank = {s for s in ranks & sealed if any(id.step is not None for id in sealed_generations(run, s))}
        found = find_checkpoints(self.entries, run.patterns, by_bytes, by_rank)
        found = [_as_on_record(run, c) if c.series in sealed else c for c in found]
        found += _without_weights(run, self.entries, found, sealed)
        if run.layouts:
            from ckptguard.runs.plugin_layouts import with_plugin_layouts  # only for runs that name some

            found = with_plugin_layouts(run, self.entries, found)
        closed = [e for e in self.entries if e.kind == "unread"]
        found += _unread_on_record(run, closed, found, sealed) if closed else []
        self.checkpoints = {c.path: c for c in sorted(found, key=lambda c: c.path)}

    @cached_property
    def unread(self) -> tuple[Entry, ...]:
        """What nobody can look at: folders that cannot be listed, and what may be checkpoints with names that cannot be
        read."""
        owned = {entry.key for checkpoint in self.checkpoints.values() for entry in checkpoint.irregular}
        odd = [e for e in self.entries if e.kind == "unread" or (e.kind == "unnamed" and e.key not in owned)]
        return tuple(e for e in odd if e.kind == "unread" or tensor_suffix(e.key) or "." not in e.name)

    @cached_property
    def series(self) -> dict[str, SeriesInPlace]:
        """The checkpoints by series."""
        found: dict[str, list[Checkpoint]] = {}
        for checkpoint in self.checkpoints.values():
            found.setdefault(checkpoint.series, []).append(checkpoint)
        return {series: _in_place(tuple(own)) for series, own in found.items()}

    @cached_property
    def not_understood(self) -> NotUnderstood | None:
        """The files outside checkpoints that may be state and that nobody can read."""
        owned = {e.key for c in self.checkpoints.values() for e in (*c.entries, *c.irregular)}
        rest = [e for e in self.entries if e.kind == "file" and e.key not in owned]
        return find_not_understood(self._run, rest) if rest else None

    @property
    def unread_notes(self) -> tuple[str, ...]:
        """A sentence for each of them, if they are not too many."""
        named = [f"{escape(e.key)} was not looked at: {e.target or UNNAMED}" for e in self.unread[:_MOST_NOTED]]
        left = len(self.unread) - len(named)
        return (*named, f"{left} more were not looked at") if left else tuple(named)

    @cached_property
    def sum_lists(self) -> dict[str, list[Entry]]:
        """Files whose names say that they hold checksums, by folder."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            if is_sum_list(entry.name):
                found.setdefault(entry.key.rpartition("/")[0], []).append(entry)
        return found

    def taken_over(self, run: Run, entries: Sequence[Entry]) -> bool:
        """True if listing the same run gave just these entries again. Then this is the listing of `run` from now on."""
        known = self._run
        same = (known.url, known.records.url, known.patterns, known.options, known.layouts)
        if same != (run.url, run.records.url, run.patterns, run.options, run.layouts) or self.entries != entries:
            return False
        if run.layouts and any(trouble for c in self.checkpoints.values() for _, trouble in c.asked):
            return False  # a plugin gave no answer, and may now
        self._run = run  # the storage of an earlier opening may have lost its connection
        return True

    def again(self, path: str) -> Listing:
        """Return the listing with one checkpoint's entries listed again. Only these are read."""
        before = {entry.key: entry for entry in self._near(path)}
        now = {entry.key: entry for entry in _entries_of(self._run, path)}
        if before == now:
            return self
        return Listing(self._run, (*(e for e in self.entries if e.key not in before), *now.values()))

    def _near(self, path: str) -> Iterator[Entry]:
        """Yield the listed entries that `_entries_of` would list again."""
        if _all_beside_decide(path):
            folder = folder_of(path)
            yield from (entry for entry in self.entries if folder_of(entry.key) == folder)
        else:
            for key in (path, *_companions(path)):
                place = bisect_left(self.entries, key, key=_KEY)
                if place < len(self.entries) and self.entries[place].key == key:
                    yield self.entries[place]
        for place in range(bisect_left(self.entries, f"{path}/", key=_KEY), len(self.entries)):
            if not self.entries[place].key.startswith(f"{path}/"):
                break
            yield self.entries[place]


def _in_place(checkpoints: tuple[Checkpoint, ...]) -> SeriesInPlace:
    sizes = [c.bytes for c in checkpoints]
    times = newest_saves(at / 1e9 for c in checkpoints if (at := c.written_at))
    return SeriesInPlace(checkpoints, sum(sizes), max(sizes), times)


def list_run(run: Run, before: Listing | None = None) -> Listing:
    """List a run; return `before` if no entry differs. A failed listing raises: it never looks like an empty run. A
    folder that cannot be listed is an entry of its own."""
    entries = tuple(run.storage.list("", recursive=True, enter=enter, unread=True))
    return before if before is not None and before.taken_over(run, entries) else Listing(run, entries)


def list_near(run: Run, paths: Iterable[str]) -> Listing:
    """List only some checkpoints, and the files beside and above them."""
    beside: dict[str, list[Entry]] = {}
    found: list[Entry] = []
    for path in paths:
        parts = [] if path == "." else path.split("/")
        above = ["/".join(parts[:depth]) for depth in range(len(parts) or 1)]
        if not all(map(enter, (*above[1:], path))):
            continue
        for folder in above:
            if folder not in beside:
                beside[folder] = run.storage.list(folder, recursive=False)
                found += (e for e in beside[folder] if e.kind != "folder")
        if any(e.key == path and e.kind == "folder" for e in beside[above[-1]]):
            found += run.storage.list(path, recursive=True, enter=enter, unread=True)
    return Listing(run, {e.key: e for e in found}.values())


def select_checkpoint(run: Run, checkpoints: Iterable[Checkpoint], word: str) -> Checkpoint:
    """Return the checkpoint that a path, an id or a step names. Raises NotFoundError."""
    found = list(checkpoints)
    name = word.rstrip("/").removeprefix(run.url.rstrip("/") + "/")
    chosen = [c for c in found if c.path == name]
    if not chosen:
        parsed = parse_id("", word)
        step = parsed.step if parsed else whole_number(word)
        chosen = [c for c in found if step is not None and c.step == step]
    if len(chosen) > 1:
        paths = ", ".join(c.path for c in chosen)
        raise NotFoundError(f"{word} may mean any of {paths}", hint="name the path of the one that you mean")
    if not chosen:
        raise NotFoundError(f"there is no checkpoint {word} in {run.url}")
    return chosen[0]


def _companions(path: str) -> list[str]:
    """Return the keys of all files beside a checkpoint that any layout may count to it."""
    parent, slash, name = path.rpartition("/")
    beside = {other for row in LAYOUTS.values() for other in row.companions(name, frozenset())} - {name}
    return [parent + slash + other for other in sorted(beside)]


def _all_beside_decide(path: str) -> bool:
    """True if the names of all files beside a checkpoint decide which of them belong to it."""
    return path == "." or may_be_of_rank(path.rpartition("/")[2])


def _entries_of(run: Run, path: str) -> list[Entry]:
    """List what is under a checkpoint's path, and the files beside it that may belong to it."""
    wanted = (path, *_companions(path))
    if _all_beside_decide(path):
        alone = run.storage.list(folder_of(path), recursive=False)
    elif run.storage.root is None:  # a store may state another time for a single object than in a listing
        alone = [e for e in run.storage.list(path.rpartition("/")[0], recursive=False) if e.key in wanted]
    else:
        alone = [entry for key in wanted if (entry := find_entry(run.storage, key)) is not None]
    below: Sequence[Entry] = ()
    if any(e.key == path and e.kind == "folder" for e in alone):
        below = run.storage.list(path, recursive=True, enter=enter, unread=True)
    return [*(e for e in alone if e.kind != "folder"), *below]


def _as_on_record(run: Run, checkpoint: Checkpoint) -> Checkpoint:
    """Read the number in a name as in those of its series that are on record: the reading once chosen stays, also where
    the release was one that read fewer names."""
    name, chosen = checkpoint.path.rpartition("/")[2], choose(run.patterns, checkpoint.path)
    if "#" not in checkpoint.series.rpartition("/")[2] or may_be_of_rank(name) or (chosen and chosen.step):
        return checkpoint
    numbers = re.findall(r"\d+", name)
    by_words = checkpoint.step is not None and step_from_name(name, words=False) is None
    if not by_words and (checkpoint.step is not None or len(numbers) > 1):
        return checkpoint
    known = sealed_generations(run, checkpoint.series)
    is_numbered = any(id.step is not None for id in known)
    if not known or is_numbered == by_words:
        return checkpoint
    return msgspec.structs.replace(checkpoint, step=int(numbers[0][:20]) if is_numbered else None)


def _without_weights(
    run: Run, entries: Sequence[Entry], found: Sequence[Checkpoint], known: Collection[str]
) -> list[Checkpoint]:
    """Return the sealed folders whose remaining files make no checkpoint."""
    folders: dict[str, list[Entry]] = {}
    for entry in entries:
        parts = entry.key.split("/") if entry.kind == "unread" else entry.key.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            folders.setdefault("/".join(parts[:depth]), []).append(entry)
    taken = {c.path for c in found}
    lost = []
    for folder, own in folders.items():
        series = series_of(folder)
        if series not in known or folder in taken:
            continue
        step = step_from_name(folder.rpartition("/")[2])
        layout = _sealed_layout(run, series, step, folder)
        if layout is not None:
            files = tuple(e for e in own if e.kind == "file")
            others = tuple(e for e in own if e.kind not in ("file", "folder"))
            lost.append(
                Checkpoint(path=folder, layout=layout, series=series, step=step, entries=files, irregular=others)
            )
    return lost


def _unread_on_record(
    run: Run, closed: Iterable[Entry], found: Sequence[Checkpoint], known: Collection[str]
) -> list[Checkpoint]:
    """Return the checkpoints on record below folders that cannot be listed, unless they were seen to be gone. They may
    be there: nobody may take them for removed."""
    from ckptguard.records.emptied import was_emptied  # few runs have such folders
    from ckptguard.records.trash import list_trashed

    lost: list[Checkpoint] = []
    for entry in closed:
        for series in sorted(one for one in known if one.startswith(f"{entry.key}/")):
            history, aside = history_of_series(run, series), set(list_trashed(run))
            for step in islice(history.steps(series), _MOST_LOST):
                id = max(step.ids[MANIFESTS] - step.ids[QUARANTINE] - aside, key=_ORDER, default=None)
                manifest, current_verdict = (
                    (None, None) if id is None else (history.manifest(id), history.current_verdict(id))
                )
                if manifest is None or (current_verdict is not None and was_emptied(run, current_verdict)):
                    continue
                own = Checkpoint(
                    path=manifest.path,
                    layout=manifest.layout,
                    series=series,
                    step=manifest.step,
                    entries=(),
                    irregular=(entry,),
                )
                lost += [own] if all(own.path != c.path for c in (*found, *lost)) else []
    return lost


def _sealed_layout(run: Run, series: str, step: Step, path: str) -> str | None:
    """Return the layout under which a path was sealed, or None."""
    for id in sealed_generations(run, series):
        with contextlib.suppress(RecordsError):
            manifest = read_manifest(run, id) if id.step == step else None
            if manifest is not None and manifest.path == path:
                return manifest.layout
    return None
