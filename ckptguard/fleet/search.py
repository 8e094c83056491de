"""Search one place for runs, with one listing of each folder, and remember what did not change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec

from ckptguard.errors import (
    CkptguardError,
    DeniedError,
    NotFoundError,
    ObjectMissingError,
    StorageError,
    TransientError,
)
from ckptguard.layouts import enter, find_checkpoints, single_file, step_from_name
from ckptguard.layouts.plain_folder import is_loose
from ckptguard.storage import Entry, open_storage
from ckptguard.storage.protocol import join
from ckptguard.values.ids import RECORDS_FOLDER, escape, numbers_of
from ckptguard.values.patterns import choose
from ckptguard.values.settings import Settings

CAUSES = ("permission", "missing", "credentials", "timeout", "other")
MOST_FOLDERS = 20_000
_AT_ONCE = 8  # folders of an object store
_PEEKS = 4  # folders with names of saves that are listed before a folder counts as one without saves
_FRESH = 2 * 10**9  # ns: a folder that changed this short before its listing may have changed after it, unnoticed
_SAVES = "checkpoints"  # the folder in which trainers keep the saves of the run around it


class _Folder(msgspec.Struct):
    """What one listing said of a folder."""

    stamp: tuple[int | None, int | None] | None  # None: list it again in any case
    has_records: bool
    below: tuple[str, ...]  # the names of the folders to search
    only_records: bool = False  # nothing else is in it
    holds: bool | None = None  # checkpoints; None: not judged yet, or there are none so far
    unwritten: tuple[str, ...] = ()  # the folders below with names of saves that held nothing yet


class Trouble(NamedTuple):
    """What could not be searched. `whole`: nothing of the place could."""

    sentence: str
    cause: str
    whole: bool = False


def cause_of(error: CkptguardError, place: str) -> str:
    """Return the cause of a failed search: one of `CAUSES`."""
    if isinstance(error, NotFoundError | ObjectMissingError):
        return "missing"
    if isinstance(error, DeniedError):
        return "credentials" if "://" in place else "permission"
    return "timeout" if isinstance(error, TransientError) else "other"


class _TooManyError(CkptguardError):
    """There are more folders than a search lists."""


class RunSearch:
    """One root of a fleet. `find` may be called again and again.

    `parts` are shell patterns for the names of the first levels below the root. A folder that was once a run stays one
    as long as it is there.
    """

    def __init__(self, root: str, parts: Sequence[str], depth: int, settings: Settings) -> None:
        self._root, self._parts, self._depth = root, tuple(parts), depth
        self._patterns = settings.patterns
        self._storage = open_storage(root, must_exist=False, options=settings.storage)
        self._runs: set[str] = set()
        self._folders: dict[str, _Folder] = {}
        self._seen: set[str] = set()
        self._spreads = False
        self._ended: set[str] = set()
        self.troubles: list[Trouble] = []

    @property
    def folders(self) -> list[str]:
        """The local folders in which a new run would be seen, after `find`."""
        return [] if self._storage.root is None else [self._storage.path_of(key) for key in self._folders]

    def forget(self, key: str) -> None:
        """Find this run no more while only its records are left."""
        self._ended.add(key)

    def find(self) -> list[str]:
        """Return the keys of the runs, sorted; "" is the root itself. `troubles` says what could not be listed.

        What lies in a folder that cannot be listed is as it was before.
        """
        self.troubles = []
        self._seen = set()
        found = set(self._fitting("", self._parts))
        self._runs = found
        self._folders = {key: folder for key, folder in self._folders.items() if key in self._seen}
        return sorted(found)

    def _fitting(self, key: str, parts: tuple[str, ...]) -> Iterator[str]:
        """Yield the runs at or below the folders whose names fit the parts."""
        if not parts:
            yield from self._below(key, self._depth)
            return
        try:
            names = self._look(key).below
        except CkptguardError as error:
            yield from self._as_before(key, error)
            return
        fitting = [name for name in names if fnmatchcase(name, parts[0])]
        yield from self._each(lambda name: list(self._fitting(join(key, name), parts[1:])), fitting)
        if not fitting and not key:
            place = escape(self._storage.path_of(key))
            self.troubles.append(Trouble(f"no folder in {place} has a name like {parts[0]}", "missing"))

    def _below(self, key: str, depth: int) -> list[str]:
        """Return the runs at or below a folder."""
        if key and key in self._runs and key not in self._ended:
            return [key]
        try:
            folder = self._look(key)
            if key in self._ended:
                if folder.only_records:
                    return []
                self._ended.discard(key)
            if folder.has_records and key:
                return [key]
            certain = key in self._runs or folder.has_records
            if not certain and not self._holds(key, folder):
                # A first save that is being written may hold something by now. It is no run.
                names = [name for name in folder.below if name not in folder.unwritten]
                return self._inside(key, names, depth)
            # A stray save, or a command on the wrong folder, must not turn a fleet into one run.
            saves = self._saves_in(folder)
            if any(self._is_recorded(join(key, name)) for name in saves[:_PEEKS]):
                return self._inside(key, folder.below, depth)
            inside = self._inside(key, [name for name in folder.below if name not in saves], depth)
            is_group = any(map(self._is_recorded, inside)) or (inside and not key and not certain)
            return inside if is_group else [key]
        except CkptguardError as error:
            return self._as_before(key, error)

    def _inside(self, key: str, names: Sequence[str], depth: int) -> list[str]:
        return self._each(lambda name: self._below(join(key, name), depth - 1), names) if depth > 0 else []

    def _each(self, search: Callable[[str], list[str]], names: Sequence[str]) -> list[str]:
        """Search several folders. Some at a time where each request takes long, but not in their folders again."""
        if self._storage.root is not None or len(names) < 2 or self._spreads:
            return [run for name in names for run in search(name)]
        self._spreads = True
        try:
            with ThreadPoolExecutor(_AT_ONCE, "search") as pool:
                return [run for found in pool.map(search, names) for run in found]
        finally:
            self._spreads = False

    def _is_recorded(self, key: str) -> bool:
        return key in self._runs or self._look(key).has_records

    def _as_before(self, key: str, error: CkptguardError) -> list[str]:
        """Tell of a folder that could not be listed, and return the runs that were there before."""
        self._note(key, error)
        return [run for run in self._runs if not key or run == key or run.startswith(f"{key}/")]

    def _note(self, key: str, error: CkptguardError) -> None:
        place = self._storage.path_of(key)
        too_many = isinstance(error, _TooManyError)  # one sentence, and not one for each of them
        sentence = error.message if too_many else f"{escape(place)} cannot be searched: {error.message}"
        self.troubles.append(Trouble(sentence, cause_of(error, place), whole=not key and not too_many))

    def _look(self, key: str) -> _Folder:
        """List a folder, unless it did not change since."""
        before = self._folders.get(key)
        self._seen.add(key)
        if before is not None and before.stamp is not None and self._stamp(key) == before.stamp:
            return before
        if len(self._seen) > MOST_FOLDERS:
            place = escape(self._storage.path_of(""))
            raise _TooManyError(
                f"not all of {place} is searched: it has more than {MOST_FOLDERS} folders; name some nearer to the runs"
            )
        stamp = self._stamp(key)
        entries = self._storage.list(key)
        below = tuple(e.name for e in entries if e.kind == "folder" and enter(e.key))
        records = any(e.name == RECORDS_FOLDER and e.kind == "folder" for e in entries)
        folder = self._folders[key] = _Folder(stamp=stamp, has_records=records, below=below)
        folder.only_records = records and len(entries) == 1
        folder.holds = True if self._has_loose(key, entries) else None
        return folder

    def _stamp(self, key: str) -> tuple[int | None, int | None] | None:
        """Return what changes with the names in a local folder; None if nothing does for certain."""
        if self._storage.root is None:
            return None
        found = self._storage.stat(key)
        recent = found.mtime_ns is None or time.time_ns() - found.mtime_ns < _FRESH
        return None if recent else (found.mtime_ns, found.inode)

    def _holds(self, key: str, folder: _Folder) -> bool:
        """True if checkpoints lie in a folder. Few of its folders are listed for that."""
        if folder.holds is not None:
            return folder.holds
        names = [name for name in self._saves_in(folder) if join(key, name) not in self._runs]
        folder.unwritten = ()
        for name in names[:_PEEKS]:
            below = join(key, name)
            holds = self._is_run_of_saves(below) if name == _SAVES else self._is_save(below, name)
            if holds is not None:
                folder.holds = holds
                return holds
            if not (name == _SAVES and self._look(below).has_records):
                folder.unwritten += (name,)
        if names:
            folder.stamp = None  # what is written into these folders changes nothing that this folder shows
        return False

    def _saves_in(self, folder: _Folder) -> list[str]:
        """Return the names in a folder that may be saves, the newest first."""
        names = filter(self._may_be_save, folder.below)
        return sorted(names, key=lambda n: (n == _SAVES, numbers_of(step_from_name(n, words=False)), n), reverse=True)

    def _may_be_save(self, name: str) -> bool:
        """True if a folder with this name may be a checkpoint, or hold those of the folder around it."""
        stated = is_loose(f"{name}.ckpt", words=False)  # a run may be "00001-experiment"
        return stated or name == _SAVES or choose(self._patterns, name) is not None

    def _is_run_of_saves(self, key: str) -> bool | None:
        folder = self._look(key)
        return None if folder.has_records or not self._holds(key, folder) else True

    def _is_save(self, key: str, name: str) -> bool | None:
        """True if a folder is one checkpoint. False if it is a run itself, None if it holds nothing yet, or nobody can
        look into it."""
        asked: set[str] = set()

        def watch(below: str) -> bool:
            asked.add(below)
            return enter(below)

        try:
            entries = self._storage.list(key, recursive=True, enter=watch)
        except StorageError as error:
            self._note(key, error)
            return None
        if join(key, RECORDS_FOLDER) in asked:
            return False
        found = find_checkpoints([_under(name, key, entry) for entry in entries], self._patterns)
        if not found:
            return None
        return [c.path for c in found] == [name]

    def _has_loose(self, key: str, entries: Sequence[Entry]) -> bool:
        """True if files that lie directly in a folder are checkpoints."""
        files = [_under("", key, e) for e in entries if e.kind != "folder"]
        around = {e.name for e in files}
        return any(
            c.path == "." or c.layout != single_file.LAYOUT.name or c.step is not None or is_loose(c.path, around)
            for c in find_checkpoints(files, self._patterns)
        )


def _under(name: str, folder: str, entry: Entry) -> Entry:
    """Return an entry of a folder as if that were called `name`."""
    return msgspec.structs.replace(entry, key=join(name, entry.key[len(folder) + 1 :] if folder else entry.key))
