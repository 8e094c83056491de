"""Whether a worker sees the storage that its coordinator sees: by one file of each place that a task is about.

In a copy of a run a file has another time or inode, and on a machine without the mount it is missing. A machine on
which the same file looks different would find each verdict outdated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from ckptguard.bulk.messages import Table, Task, Witness
from ckptguard.errors import CkptguardError, DeniedError, ObjectMissingError
from ckptguard.runs.file_signatures import is_same_file
from ckptguard.storage import Entry, Storage, open_storage
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import RECORDS_FOLDER, escape
from ckptguard.values.record_formats import FORMAT_KEY
from ckptguard.values.storage_options import StorageOptions

_AT_ONCE = 8  # runs that are looked at


class Sight:
    """What the coordinator sees. `options` are its storage options, by the URL of a run."""

    def __init__(self, options: Mapping[str, Mapping[str, Table]]) -> None:
        self._options = options
        self._known: dict[str, Witness] = {}

    def look(self, tasks: Iterable[Task]) -> None:
        """Look at the places of several tasks side by side."""
        with ThreadPoolExecutor(_AT_ONCE, "look") as pool:
            list(pool.map(self._try, tasks))

    def of(self, task: Task) -> tuple[Witness, ...]:
        """Return what a task shows its worker. Raises CkptguardError."""
        for place in _places(task):
            if place not in self._known:
                self._known[place] = Witness(place=place, entry=_choose(self._open(place, task)))
        return tuple(self._known[place] for place in _places(task))

    def changed(self, task: Task) -> bool:
        """True if what the task shows is no longer so. The next task shows something else. Raises CkptguardError."""
        for one in task.shown:
            storage = self._open(one.place, task)
            same = _choose(storage) is None if one.entry is None else not _finds(storage, one.entry)
            if not same and self._known.get(one.place) == one:
                del self._known[one.place]
        return self.of(task) != task.shown

    def has(self, task: Task) -> bool:
        """True if files of the task's checkpoint are where they were."""
        storage = self._open(task.url, task)
        found = find_entry(storage, task.path)
        return found is not None and (found.kind != "folder" or bool(storage.list(task.path, recursive=True)))

    def _try(self, task: Task) -> None:
        with contextlib.suppress(CkptguardError):  # its task says so
            self.of(task)

    def _open(self, place: str, task: Task) -> Storage:
        options = StorageOptions(self._options.get(task.url, {}))
        return open_storage(place, must_exist=False, options=options)


def other_sight(task: Task, options: StorageOptions) -> str:
    """Say what a worker does not see as the coordinator does; "" if there is nothing like that."""
    for one in task.shown:
        try:
            storage = open_storage(one.place, must_exist=False, options=options)
            reason = _finds(storage, one.entry) if one.entry is not None else ""
        except CkptguardError as error:
            reason = error.message
        if reason:
            return f"does not see {escape(one.place)} as it is here: {reason}"
    return ""


def _places(task: Task) -> list[str]:
    """Return where the files are that a task reads and writes."""
    places = [task.url, str(task.settings.get("records") or ""), task.place if task.verb == "replicate" else ""]
    return [place for place in places if place]


def _finds(storage: Storage, shown: Entry) -> str:
    """Return "" if a file is in a storage as it was shown, or what is different."""
    found = find_entry(storage, shown.key)
    if found is None:
        return f"there is no {escape(shown.key)}"
    same = is_same_file(shown, found, local=storage.root is not None)
    return "" if same else f"{escape(shown.key)} is another file"


def _choose(storage: Storage) -> Entry | None:
    """Return a file that stays as it is: of the records, or the oldest that is found soon. None without any file."""
    try:
        return find_entry(storage, f"{RECORDS_FOLDER}/{FORMAT_KEY}") or _oldest(storage, "")
    except ObjectMissingError:
        return None


def _oldest(storage: Storage, folder: str) -> Entry | None:
    """Return the oldest file in a folder, or in the first one below it that has any."""
    try:
        entries = storage.list(folder)
    except DeniedError:
        if not folder:
            raise
        return None  # others have a file to show
    files = [entry for entry in entries if entry.kind == "file"]
    below = (_oldest(storage, entry.key) for entry in entries if entry.kind == "folder")
    first = next(filter(None, below), None)
    return min((*files, *filter(None, [first])), key=lambda file: (file.mtime_ns or 0, file.key), default=None)
