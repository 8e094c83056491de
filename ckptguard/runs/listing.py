"""The checkpoints of a run as storage shows them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from ckptguard.errors import NotFoundError, RecordsError
from ckptguard.layouts import LAYOUTS, Checkpoint, enter, find_checkpoints, step_from_name
from ckptguard.records.manifests import FOLDER as MANIFESTS
from ckptguard.records.manifests import read_manifest, sealed_generations
from ckptguard.records.run import Run, list_records
from ckptguard.runs.file_signatures import entry_now
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import parse_id, series_from_folder, series_of


class Listing:
    """What a run held when it was listed: `entries`, sorted by key, and the `checkpoints` that they make, by path.

    A folder that no layout recognises any more (its weights are gone), but that was sealed before, is a checkpoint.
    """

    def __init__(self, run: Run, entries: Iterable[Entry]) -> None:
        self._run = run
        self.entries = tuple(sorted(entries, key=_key))
        found = find_checkpoints(self.entries, run.patterns)
        found += _bereft(run, self.entries, found)
        self.checkpoints = {c.path: c for c in sorted(found, key=lambda c: c.path)}

    def is_of(self, run: Run) -> bool:
        """Whether this run was listed."""
        return self._run == run

    def again(self, path: str) -> Listing:
        """The same listing with the entries of one checkpoint as they are now; the others stand as they were listed.
        It costs what that checkpoint costs, however many others there are."""
        before = {entry.key: entry for entry in self._near(path)}
        now = {entry.key: entry for entry in _entries_of(self._run, path)}
        if before == now:
            return self
        return Listing(self._run, (*(e for e in self.entries if e.key not in before), *now.values()))

    def _near(self, path: str) -> Iterator[Entry]:
        """What was listed where `_entries_of` looks."""
        if path == ".":
            yield from (entry for entry in self.entries if "/" not in entry.key)
            return
        for key in (path, *_companions(path)):
            place = bisect_left(self.entries, key, key=_key)
            if place < len(self.entries) and self.entries[place].key == key:
                yield self.entries[place]
        for place in range(bisect_left(self.entries, f"{path}/", key=_key), len(self.entries)):
            if not self.entries[place].key.startswith(f"{path}/"):
                break
            yield self.entries[place]


def list_run(run: Run, before: Listing | None = None) -> Listing:
    """List a run. A failed listing raises: it never reads as "nothing here". Where no entry differs from those of a
    listing of this run `before`, that one is the answer."""
    entries = run.storage.list("", recursive=True, enter=enter)
    if before is not None and before.is_of(run) and before.entries == tuple(sorted(entries, key=_key)):
        return before
    return Listing(run, entries)


def select_checkpoint(run: Run, checkpoints: Iterable[Checkpoint], word: str) -> Checkpoint:
    """The checkpoint in place that a user means by a path, an id or a step; NotFoundError if there is none."""
    found = list(checkpoints)
    name = word.rstrip("/").removeprefix(run.url.rstrip("/") + "/")
    chosen = [c for c in found if c.path == name]
    if not chosen:
        parsed = parse_id("", word)
        step = parsed.step if parsed else int(word) if word.isascii() and word.isdigit() else None
        chosen = [c for c in found if step is not None and c.step == step]
    if len(chosen) > 1:
        paths = ", ".join(c.path for c in chosen)
        raise NotFoundError(f"{word} may mean any of {paths}", hint="name it by its path")
    if not chosen:
        raise NotFoundError(f"there is no checkpoint {word} in {run.url}")
    return chosen[0]


def _key(entry: Entry) -> str:
    return entry.key


def _companions(path: str) -> list[str]:
    """The keys of all files beside a checkpoint that may belong to it, whatever its layout."""
    parent, slash, name = path.rpartition("/")
    beside = {other for row in LAYOUTS.values() for other in row.companions(name, frozenset())} - {name}
    return [parent + slash + other for other in sorted(beside)]


def _entries_of(run: Run, path: str) -> list[Entry]:
    """What lies under a checkpoint's path, and beside it under the names of files that may belong to it."""
    if path == ".":
        return [e for e in run.storage.list("", recursive=False) if e.kind != "folder"]
    wanted = (path, *_companions(path))
    if run.storage.root is None:  # a store may state a time otherwise when it is asked for one object alone
        alone = [e for e in run.storage.list(path.rpartition("/")[0], recursive=False) if e.key in wanted]
    else:
        alone = [entry for key in wanted if (entry := entry_now(run.storage, key)) is not None]
    below: Sequence[Entry] = ()
    if any(e.key == path and e.kind == "folder" for e in alone):
        below = run.storage.list(path, recursive=True, enter=enter)
    return [*(e for e in alone if e.kind != "folder"), *below]


def _bereft(run: Run, entries: Sequence[Entry], found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Sealed folders of which only files remain that make no checkpoint of it."""
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
            files = [e for e in own if e.kind == "file"]
            others = [e for e in own if e.kind not in ("file", "folder")]
            lost.append(
                Checkpoint(
                    path=folder,
                    layout=layout,
                    series=series,
                    step=step,
                    entries=tuple(sorted(files, key=lambda e: e.key)),
                    irregular=tuple(sorted(others, key=lambda e: e.key)),
                )
            )
    return lost


def _sealed_layout(run: Run, series: str, step: int | None, path: str) -> str | None:
    """The layout under which a path was sealed, if it was."""
    for id in sealed_generations(run, series):
        if id.step == step:
            try:
                manifest = read_manifest(run, id)
            except RecordsError:
                continue
            if manifest is not None and manifest.path == path:
                return manifest.layout
    return None
