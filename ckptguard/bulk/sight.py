"""Whether a worker sees the storage that its coordinator sees: by one file of each place that a task is about.

In a copy of a run a file has another time or inode, and on a machine without the mount it is missing. A machine on
which the same file looks different would find each verdict outdated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from ckptguard.bulk.messages import Task, Witness
from ckptguard.errors import CkptguardError, DeniedError, ObjectMissingError
from ckptguard.records.run import begin_records_elsewhere
from ckptguard.replicas.mirror_records import join
from ckptguard.replicas.replicate import open_replica
from ckptguard.runs.file_signatures import is_same_file
from ckptguard.runs.run_view import open_view
from ckptguard.storage import Entry, Storage, open_storage
from ckptguard.storage.protocol import find_entry
from ckptguard.values.ids import RECORDS_FOLDER, escape
from ckptguard.values.record_formats import FORMAT_KEY
from ckptguard.values.settings import Settings
from ckptguard.values.storage_options import StorageOptions

_AT_ONCE = 8  # runs that are looked at


class Sight:
    """What the coordinator sees. `settings` are those of each run, by its URL."""

    def __init__(self, settings: Mapping[str, Settings]) -> None:
        self._settings = settings
        self._known: dict[tuple[str, ...], tuple[Witness, ...]] = {}

    def look(self, tasks: Iterable[Task]) -> dict[tuple[str, ...], str]:
        """Look at all places of tasks, side by side. Return why places cannot be looked at.

        Records elsewhere and replicas begin now, so that each has a file to show.
        """
        with ThreadPoolExecutor(_AT_ONCE, "look") as pool:
            found = pool.map(self._trouble, {places_of(task): task for task in tasks}.values())
            return dict(filter(None, found))

    def of(self, task: Task) -> tuple[Witness, ...]:
        """Return what a task shows its worker: a file of each place that has any."""
        return self._known[places_of(task)]

    def changed(self, task: Task) -> bool:
        """True if what the task shows is no longer so. The next task shows something else. Raises CkptguardError."""
        storages = {place: self._open(place, task) for place in places_of(task)}
        found = {place: _choose(storage) for place, storage in storages.items()}
        shown = tuple(Witness(place=place, entry=entry) for place, entry in found.items() if entry is not None)
        self._known[places_of(task)] = shown
        return shown != task.shown

    def has(self, task: Task) -> bool:
        """True if files of the task's checkpoint are where they were."""
        storage = self._open(task.url, task)
        found = find_entry(storage, task.path)
        return found is not None and (found.kind != "folder" or bool(storage.list(task.path, recursive=True)))

    def _trouble(self, task: Task) -> tuple[tuple[str, ...], str] | None:
        try:
            if len(places_of(task)) > 1:
                view = open_view(task.url, self._settings[task.url])
                begin_records_elsewhere(view.run)
                if task.verb == "replicate":
                    join(view.run, open_replica(view, task.place, make=True))
            self.changed(task)
        except CkptguardError as error:
            return places_of(task), error.message
        return None

    def _open(self, place: str, task: Task) -> Storage:
        return open_storage(place, must_exist=False, options=self._settings[task.url].storage)


def places_of(task: Task) -> tuple[str, ...]:
    """Return where the files are that a task reads and writes."""
    places = (task.url, str(task.settings.get("records") or ""), task.place if task.verb == "replicate" else "")
    return tuple(filter(None, places))


def other_sight(task: Task, options: StorageOptions) -> str:
    """Say what a worker does not see as the coordinator does; "" if there is nothing like that."""
    for one in task.shown:
        try:
            reason = _difference(open_storage(one.place, must_exist=False, options=options), one.entry)
        except CkptguardError as error:
            reason = error.message
        if reason:
            return f"does not see {escape(one.place)} as it is here: {reason}"
    return ""


def _difference(storage: Storage, shown: Entry) -> str:
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
