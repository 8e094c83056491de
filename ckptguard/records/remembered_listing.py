"""The names in a run's records, remembered while the times of their folders say that none came or went."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ckptguard.errors import StorageError
from ckptguard.records.names_by_step import FOLDERS, ListedSteps, list_steps
from ckptguard.records.run import Run

_QUIET = 3.0  # seconds: more than the two within which a folder's changes may have the same time
_CLOCK_STEP = 0.5  # seconds: a clock that was put back could give an old time again
_MOST_NAMES = 100_000  # some 12 MB
Marks = tuple[tuple[str, int | None, int | None, int], ...]


class RememberedListing:
    """`list_steps` of a run whose records always lie in the same place. Safe from any thread.

    A folder's change time tells that its names changed, but only in steps: what changes right after a listing can leave
    the time that was there before it. So a listing is used again only if all times had been what they are for a while
    when it began: any later change then has a later time. For that nothing need be known of clocks but that ours was
    not put back since. Where the storage's folder times tell nothing, and above `_MOST_NAMES`, all is listed each time.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._lock = threading.Lock()
        self._marks: Marks | None = None
        self._since = 0.0  # monotonic: when these marks were first seen
        self._ahead = 0.0  # the wall clock of the monotonic one, then
        self._listed: ListedSteps | None = None  # made `_QUIET` seconds or more after that

    def steps(self, run: Run) -> ListedSteps:
        """What `list_steps` would say now."""
        marks = _marks(run)
        with self._lock:
            since = self._seen(marks)
            if since is not None and self._listed is not None:
                return self._listed
        listed = list_steps(run)
        if since is not None and len(listed) <= _MOST_NAMES:
            with self._lock:
                if self._since == since:  # else another thread saw other marks meanwhile
                    self._listed = listed
        return listed

    def prepare(self, run: Run) -> None:
        """Have the names for whoever asks next, if they can be remembered by now."""
        marks = _marks(run)
        with self._lock:
            wanted = self._seen(marks) is not None and self._listed is None
        if wanted:
            self.steps(run)

    def _seen(self, marks: Marks | None) -> float | None:
        """Note the marks that there are; since when, if that is long enough."""
        now, wall = self._monotonic(), self._wall()
        if marks is not None and any(changed > wall * 1e9 for *_, changed in marks):
            marks = None  # a clock was ahead: it will be that time again
        if marks is None or marks != self._marks or abs(wall - now - self._ahead) >= _CLOCK_STEP:
            self._marks, self._since, self._ahead, self._listed = marks, now, wall - now, None
            return None
        return self._since if now - self._since >= _QUIET else None


def _marks(run: Run) -> Marks | None:
    """What changes with the names that count: each of their folders, its inode and its times, of which nobody can set
    the last. None where that cannot be relied on."""
    records = run.records
    if records.root is None or not records.capabilities().folder_times:  # elsewhere finding that out may cost a trial
        return None
    try:
        tops = [entry for entry in records.list() if entry.key in FOLDERS]
        series = [entry for top in tops if top.kind == "folder" for entry in records.list(top.key)]
    except StorageError:
        return None
    marks = []
    for folder in (*tops, *series):
        if folder.kind == "folder":
            if folder.ctime_ns is None:
                return None
            marks.append((folder.key, folder.inode, folder.mtime_ns, folder.ctime_ns))
    return tuple(marks)
