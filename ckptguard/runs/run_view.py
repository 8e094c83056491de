"""One run as one call sees it: its listing, records and settings are read once and shared."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter

from ckptguard.errors import NotFoundError, RecordsError
from ckptguard.formats import tensor_suffix
from ckptguard.formats.suffixes import is_sum_list
from ckptguard.layouts import LAYOUTS, Checkpoint, enter, find_checkpoints, step_from_name
from ckptguard.records.kept import KeptCopy, kept_of_series, read_kept
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.manifests import read_manifest, sealed_generations
from ckptguard.records.run import Run, list_records, open_run
from ckptguard.runs.history import History, load_history
from ckptguard.runs.sealed_content import is_good
from ckptguard.storage.protocol import UNNAMED, Entry, find_entry
from ckptguard.values.ids import CheckpointId, Step, escape, parse_id, series_from_folder, series_of
from ckptguard.values.settings import Settings

_KEY = attrgetter("key")


class RunView:
    """One run, for one call, in one thread. Files and record names are listed when first needed, and remembered.

    Only `look_again`, `refresh` and `forget` read again. An outdated view is safe: records are created exclusively, and
    the second writer gets BusyError.
    """

    def __init__(self, run: Run, settings: Settings) -> None:
        self.run = run
        self.settings = settings
        self._listing: Listing | None = None
        self._history: History | None = None

    @property
    def listing(self) -> Listing:
        """The run's files. Raises StorageError if they cannot be listed."""
        if self._listing is None:
            self._listing = list_run(self.run)
        return self._listing

    def take_listed(self, entries: Sequence[Entry]) -> None:
        """Use a listing of the run that the caller has just made."""
        self._listing = Listing(self.run, entries)

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

    def checkpoint(self, path: str) -> Checkpoint | None:
        """Return the listed checkpoint with exactly this path, or None."""
        return self.listing.checkpoints.get(path)

    def look_again(self, path: str) -> Checkpoint | None:
        """List only this checkpoint's entries again, and return it as it is now, or None."""
        self._listing = self.listing.again(path)
        return self._listing.checkpoints.get(path)

    def refresh(self, series: str | None = None) -> None:
        """Read the record names of one series again, or of all when next needed."""
        if series is None:
            self._history = None
        elif self._history is not None:
            self._history.refresh(series)

    def forget(self) -> None:
        """List files and records again when next needed. Call it after many files were moved."""
        self._listing = None
        self._history = None

    def current(self, checkpoint: Checkpoint) -> CheckpointId | None:
        """Return the generation whose content should be at a checkpoint's path; see `History.current`."""
        return self.history.current(checkpoint.series, checkpoint.step, checkpoint.path)

    def current_if_readable(self, checkpoint: Checkpoint) -> CheckpointId | None:
        """Return the same; None also if a manifest cannot be read."""
        return self.history.current_if_readable(checkpoint.series, checkpoint.step, checkpoint.path)

    def new_id(self, checkpoint: Checkpoint) -> CheckpointId:
        """Return the generation for content that is not sealed yet. A kept copy of these files already has one.

        Earlier contents of this path that wait as whole copies keep their own ids.
        """
        id = self.history.next_id(checkpoint.series, checkpoint.step)
        for copy in self.waiting_copies(checkpoint.series):
            if (copy.step, copy.path) == (id.step, checkpoint.path) and copy.generation >= id.generation:
                if copy.lies_in(checkpoint.entries):
                    return copy.id
                if copy.whole:
                    return CheckpointId(id.series, id.step, copy.generation + 1)
        return id

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
        return is_good(self.history, id)


def open_view(url: str, settings: Settings, *, must_exist: bool = True) -> RunView:
    """Open a run and return a view of it. Raises the errors of `open_run`."""
    return RunView(open_run(url, settings, must_exist=must_exist), settings)


class Listing:
    """A run's `entries`, sorted by key, and its `checkpoints` by path.

    A sealed folder counts as a checkpoint even if its weights are gone and no layout recognises it.
    """

    def __init__(self, run: Run, entries: Iterable[Entry]) -> None:
        self._run = run
        self.entries = tuple(sorted(entries, key=_KEY))
        found = find_checkpoints(self.entries, run.patterns)
        found += _bereft(run, self.entries, found)
        self.checkpoints = {c.path: c for c in sorted(found, key=lambda c: c.path)}

    @cached_property
    def unnamed(self) -> tuple[str, ...]:
        """The entries outside checkpoints that may be some, and have names that cannot be read."""
        owned = {entry.key for checkpoint in self.checkpoints.values() for entry in checkpoint.irregular}
        odd = (e for e in self.entries if e.kind == "unnamed" and e.key not in owned)
        return tuple(e.key for e in odd if tensor_suffix(e.key) or "." not in e.name)

    @property
    def unnamed_notes(self) -> tuple[str, ...]:
        """A sentence for each of them."""
        return tuple(f"{escape(key)} was not looked at: {UNNAMED}" for key in self.unnamed)

    @cached_property
    def _sum_lists(self) -> dict[str, list[Entry]]:
        """Files whose names say that they hold checksums, by folder."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            if is_sum_list(entry.name):
                found.setdefault(entry.key.rpartition("/")[0], []).append(entry)
        return found

    def sum_lists_beside(self, checkpoint: Checkpoint) -> Sequence[Entry]:
        """The files with checksums that lie beside a checkpoint without a folder of its own."""
        if checkpoint.path != "." and checkpoint.path not in checkpoint.files:
            return ()
        return self._sum_lists.get(checkpoint.path.rpartition("/")[0], ())

    def is_of(self, run: Run) -> bool:
        """True if this is a listing of the run."""
        return self._run == run

    def again(self, path: str) -> Listing:
        """Return the listing with one checkpoint's entries listed again. Only these are read."""
        before = {entry.key: entry for entry in self._near(path)}
        now = {entry.key: entry for entry in _entries_of(self._run, path)}
        if before == now:
            return self
        return Listing(self._run, (*(e for e in self.entries if e.key not in before), *now.values()))

    def _near(self, path: str) -> Iterator[Entry]:
        """Yield the listed entries that `_entries_of` would list again."""
        if path == ".":
            yield from (entry for entry in self.entries if "/" not in entry.key)
            return
        for key in (path, *_companions(path)):
            place = bisect_left(self.entries, key, key=_KEY)
            if place < len(self.entries) and self.entries[place].key == key:
                yield self.entries[place]
        for place in range(bisect_left(self.entries, f"{path}/", key=_KEY), len(self.entries)):
            if not self.entries[place].key.startswith(f"{path}/"):
                break
            yield self.entries[place]


def list_run(run: Run, before: Listing | None = None) -> Listing:
    """List a run; return `before` if no entry differs. A failed listing raises: it never looks like an empty run."""
    entries = run.storage.list("", recursive=True, enter=enter)
    if before is not None and before.is_of(run) and before.entries == tuple(sorted(entries, key=_KEY)):
        return before
    return Listing(run, entries)


def select_checkpoint(run: Run, checkpoints: Iterable[Checkpoint], word: str) -> Checkpoint:
    """Return the checkpoint that a path, an id or a step names. Raises NotFoundError."""
    found = list(checkpoints)
    name = word.rstrip("/").removeprefix(run.url.rstrip("/") + "/")
    chosen = [c for c in found if c.path == name]
    if not chosen:
        parsed = parse_id("", word)
        step = parsed.step if parsed else int(word) if word.isascii() and word.isdigit() else None
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


def _entries_of(run: Run, path: str) -> list[Entry]:
    """List what is under a checkpoint's path, and the files beside it that may belong to it."""
    if path == ".":
        return [e for e in run.storage.list("", recursive=False) if e.kind != "folder"]
    wanted = (path, *_companions(path))
    if run.storage.root is None:  # a store may state another time for a single object than in a listing
        alone = [e for e in run.storage.list(path.rpartition("/")[0], recursive=False) if e.key in wanted]
    else:
        alone = [entry for key in wanted if (entry := find_entry(run.storage, key)) is not None]
    below: Sequence[Entry] = ()
    if any(e.key == path and e.kind == "folder" for e in alone):
        below = run.storage.list(path, recursive=True, enter=enter)
    return [*(e for e in alone if e.kind != "folder"), *below]


def _bereft(run: Run, entries: Sequence[Entry], found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the sealed folders whose remaining files make no checkpoint."""
    folders: dict[str, list[Entry]] = {}
    for entry in entries:
        parts = entry.key.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            folders.setdefault("/".join(parts[:depth]), []).append(entry)
    taken = {c.path for c in found}
    known = {series_from_folder(folder) for folder in list_records(run, MANIFESTS)}
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


def _sealed_layout(run: Run, series: str, step: Step, path: str) -> str | None:
    """Return the layout under which a path was sealed, or None."""
    for id in sealed_generations(run, series):
        with contextlib.suppress(RecordsError):
            manifest = read_manifest(run, id) if id.step == step else None
            if manifest is not None and manifest.path == path:
                return manifest.layout
    return None
