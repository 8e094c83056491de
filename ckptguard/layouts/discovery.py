"""Find the checkpoints in a listing of a run. Pure: names alone decide."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence

import msgspec

from ckptguard.layouts.checkpoint import Checkpoint, Folder, Layout
from ckptguard.layouts.plain_folder import holds_state, is_loose
from ckptguard.layouts.step_names import (
    OWN_SUFFIX,
    counts_steps,
    is_part,
    may_be_of_rank,
    saves_by_rank,
    step_from_name,
)
from ckptguard.layouts.table import LAYOUTS
from ckptguard.storage.protocol import Entry
from ckptguard.values.ids import RECORDS_FOLDER, is_temporary, series_of
from ckptguard.values.patterns import Pattern, choose, is_ignored

FINAL_SERIES = "final"
_IN_HUB_CACHE = re.compile(
    r"(?:.*/)?(?:models|datasets|spaces|kernels)--[^/]+/(?:snapshots|blobs|refs|trees)", re.DOTALL
)
_FINAL_NAMES = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_FINAL_BESIDE = ("config.json", "generation_config.json", "adapter_config.json", "training_args.bin")


def enter(key: str) -> bool:
    """True if a listing of a run enters this folder. It skips our records, temporaries, hidden folders, and hub caches,
    whose models are downloads."""
    name = key.rpartition("/")[2]
    if _IN_HUB_CACHE.fullmatch(key):
        return False
    return name != RECORDS_FOLDER and not is_temporary(name) and not name.startswith(".") and name != "__pycache__"


def find_checkpoints(
    entries: Sequence[Entry],
    patterns: Sequence[Pattern] = (),
    state_files: Collection[str] = (),
    by_rank: Collection[str] = (),
) -> list[Checkpoint]:
    """Return the checkpoints in a recursive listing of a run (made with `enter`), sorted by path.

    A folder's checkpoint owns all files below it, except those of checkpoints nested in it. The user's `patterns` come
    before every layout. `state_files` are keys of files that hold state, whatever their names say. `by_rank` are series
    on record whose saves have one file for each rank.
    """
    tree = _Tree(entries, patterns, state_files, by_rank)
    roots = tree.roots()
    inside: dict[str, list[Entry]] = {path: [] for path in roots}
    for folder, own in tree.folders.items():
        nearest = next((path for path in _upwards(folder) if path in roots), None)
        if nearest is not None:
            inside[nearest] += own
    found = [tree.folder_checkpoint(path, layout, inside[path]) for path, layout in roots.items()]
    owned = {e.key for c in found for e in (*c.entries, *c.irregular)}
    for folder, own in tree.folders.items():
        if not any(p in roots for p in _upwards(folder)):
            found += tree.loose_files(folder, [e for e in own if e.key not in owned])
    return sorted((c for c in found if c.entries or c.irregular), key=lambda c: c.path)


def folder_as_checkpoint(name: str, entries: Sequence[Entry]) -> Checkpoint | None:
    """Return the folder itself as one checkpoint, if a layout accepts it. Its entries' keys begin with `name`."""
    tree = _Tree(entries)
    layout = tree.layout_of(name)
    return _checkpoint(name, layout, itertools.chain(*tree.folders.values())) if layout is not None else None


class _Tree:
    """A listing by folders, without temporaries."""

    def __init__(
        self,
        entries: Sequence[Entry],
        patterns: Sequence[Pattern] = (),
        state_files: Collection[str] = (),
        by_rank: Collection[str] = (),
    ) -> None:
        self.patterns, self._state_files, self._by_rank = patterns, state_files, by_rank
        self.folders: dict[str, list[Entry]] = {"": []}
        self._below: dict[str, set[str]] = {}
        self._unread: set[str] = set()
        ignoring = any(pattern.ignore for pattern in patterns)
        for entry in entries:
            if any(is_temporary(part) for part in entry.key.split("/")) or (
                ignoring and is_ignored(patterns, entry.key)
            ):
                continue
            is_unread = entry.kind == "unread"  # a folder, in which it stands for all that is there
            parent = entry.key if is_unread else entry.key.rpartition("/")[0]
            for folder in _upwards(parent):
                self.folders.setdefault(folder, [])
                if folder not in (parent, "") and not is_unread:
                    self._below.setdefault(folder, set()).add(entry.key[len(folder) + 1 :])
            self.folders[parent].append(entry)
            self._unread |= {parent} if is_unread else set()

    def names(self, folder: str) -> frozenset[str]:
        """Return the names in a folder that are not folders."""
        return frozenset(e.name for e in self.folders.get(folder, ()) if e.kind not in ("folder", "unread"))

    def layout_of(self, path: str) -> Layout | None:
        """Return the first layout that accepts a folder; for a name that the user gave, at least "folder"."""
        files, around = self.names(path), self.names(path.rpartition("/")[0])
        folder = Folder(
            path=path,
            files=files,
            below=frozenset(self._below.get(path, ())),
            around=around,
            holds_saves=bool(self._by_rank) and any(series_of(f"{path}/{name}") in self._by_rank for name in files),
        )
        row = next((row for row in LAYOUTS.values() if row.accepts(folder)), None)
        return LAYOUTS["folder"] if row is None and files and choose(self.patterns, path) else row

    def roots(self) -> dict[str, Layout]:
        """Return the folders that are checkpoints. Folders of one series in one place have one layout.

        So a half-written folder gets the layout of its siblings, and so does one that cannot be listed.
        """
        folders = [path for path in self.folders if path]
        by_itself = {path: row for path in folders if (row := self.layout_of(path)) is not None}
        order = list(LAYOUTS)
        kin: dict[str, Layout] = {}
        for path, row in sorted(by_itself.items(), key=lambda item: order.index(item[1].name)):
            kin.setdefault(series_of(path), row)
        roots = dict(by_itself)
        for path in folders:
            row = kin.get(series_of(path), LAYOUTS["folder"] if path in self._unread else None)
            if row is None or step_from_name(path.rpartition("/")[2]) is None:
                continue
            holds = self.names(path) or any(row.pieces(f) for f in self._below.get(path, ()))
            if path in by_itself or path in self._unread or holds:
                roots[path] = row
        return {path: row for path, row in roots.items() if not self._is_piece(path, roots)}

    def _is_piece(self, path: str, roots: dict[str, Layout]) -> bool:
        """True if a folder inside a checkpoint is a piece of it, not a nested checkpoint. One that cannot be listed may
        be a piece."""
        above = [p for p in _upwards(path)[1:] if p in roots]
        uncounted = bool(above) and (path in self._unread or not counts_steps(path.rpartition("/")[2]))
        return uncounted or any(roots[p].pieces(path[len(p) + 1 :]) for p in above)

    def folder_checkpoint(self, path: str, row: Layout, inside: Sequence[Entry]) -> Checkpoint:
        """Return a folder as a checkpoint, with its content and its companions beside it."""
        parent, _, name = path.rpartition("/")
        beside = row.companions(name, self.names(parent))
        entries = [*inside, *(e for e in self.folders.get(parent, ()) if e.name in beside)]
        return _checkpoint(path, row, entries, chosen=choose(self.patterns, path))

    def loose_files(self, folder: str, entries: list[Entry]) -> list[Checkpoint]:
        """Return the single-file checkpoints of a folder, and the run's final model at its root.

        Links at this level are aliases of other checkpoints (``final.pt``), and are ignored.
        """
        state = [e for e in entries if e.kind == "file" and self._holds_state(e)]
        around, by_name = self.names(folder), {e.name: e for e in entries}
        ranks = [e for e in state if may_be_of_rank(e.name)]
        known = frozenset(e.name for e in ranks if series_of(e.key) in self._by_rank)
        saves = saves_by_rank(frozenset(e.name for e in ranks), known) if ranks else {}
        unnumbered = [e for e in state if not folder and e.name not in saves and not is_loose(e.name, around)]
        final = [e for e in unnumbered if e.name in _FINAL_NAMES or is_part(e.name, around)]
        found = []
        if final:
            final += [e for e in entries if e.name in _FINAL_BESIDE or e.name.endswith(".index.json")]
            found.append(_checkpoint(".", LAYOUTS["folder"], dict.fromkeys(final), series=FINAL_SERIES))
        taken = {e.key for e in final}
        for entry in state:
            chosen = choose(self.patterns, entry.key)
            by_rank = saves.get(entry.name) if chosen is None else None
            if entry.key in taken or (by_rank is None and is_part(entry.name, around) and not chosen):
                continue
            names = by_rank.names if by_rank is not None else (entry.name,)
            if entry.name != names[0]:
                continue
            row = next(row for row in LAYOUTS.values() if row.accepts_file(entry.name, around))
            beside = (*names[1:], *row.companions(entry.name, around))
            own = [entry, *(by_name[name] for name in beside if name in by_name)]
            one = _checkpoint(entry.key, row, own, chosen=chosen, around=around)
            if by_rank is not None:
                one = msgspec.structs.replace(one, step=by_rank.step)
            if chosen is None and one.step is None and entry.key in self._state_files:
                one = msgspec.structs.replace(one, step=step_from_name(OWN_SUFFIX.sub("", entry.name)))
            found.append(one)
        return found

    def _holds_state(self, entry: Entry) -> bool:
        return entry.key in self._state_files or holds_state(entry.name) or choose(self.patterns, entry.key) is not None


def _upwards(folder: str) -> list[str]:
    """Return a folder and those around it, nearest first, the root last."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def _checkpoint(
    path: str,
    row: Layout,
    entries: Iterable[Entry],
    *,
    series: str | None = None,
    chosen: Pattern | None = None,
    around: frozenset[str] = frozenset(),
) -> Checkpoint:
    ordered = sorted(entries, key=lambda e: e.key)
    step = step_from_name(path.rpartition("/")[2], around) if series is None else None
    return Checkpoint(
        path=path,
        layout=row.name,
        series=series_of(path) if series is None else series,
        step=chosen.step_of(path) if chosen is not None and chosen.step is not None else step,
        entries=tuple(e for e in ordered if e.kind == "file"),
        irregular=tuple(e for e in ordered if e.kind not in ("file", "folder")),
    )
