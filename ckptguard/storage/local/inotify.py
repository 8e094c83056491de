"""Linux's inotify by watchdog, as far as the daemon and `doctor` need it: one descriptor for any number of folders.

Watchdog's observers take a thread for each run, and pass on no lost changes. Their lowest layer does neither.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading

import msgspec

try:
    from watchdog.observers.inotify_c import InotifyFD
except (ImportError, OSError):  # another system
    InotifyFD = None  # type: ignore[assignment, misc]

CREATE, DELETE, MOVED_FROM, MOVED_TO = 0x100, 0x200, 0x40, 0x80
MODIFY, ATTRIB, CLOSE_WRITE = 0x2, 0x4, 0x8
DELETE_SELF, MOVE_SELF = 0x400, 0x800
OVERFLOW, IGNORED, IS_FOLDER = 0x4000, 0x8000, 0x40000000
_ONLY_FOLDERS, _NO_LINKS, _NOT_UNLINKED = 0x01000000, 0x02000000, 0x04000000
_WANTED = CREATE | DELETE | MOVED_FROM | MOVED_TO | MODIFY | ATTRIB | CLOSE_WRITE | DELETE_SELF | MOVE_SELF
_FLAGS = _WANTED | _ONLY_FOLDERS | _NO_LINKS | _NOT_UNLINKED
_LIMIT = "/proc/sys/fs/inotify/max_user_watches"


class FileEvent(msgspec.Struct, frozen=True):
    """What happened to `name` in a watched folder, or to the folder itself."""

    watch: int
    mask: int
    name: str


class Inotify:
    """An inotify instance. Raises OSError if the system has none left, or no inotify at all."""

    def __init__(self) -> None:
        if InotifyFD is None:
            raise OSError(errno.ENOSYS, "this system has no inotify")
        self._inotify = InotifyFD()  # its thread is not started: `read` reads
        self._inotify._is_reading = False  # else an end before the first `read` would leave the descriptor open
        self._numbers = itertools.count()
        self._known: dict[int, list[int]] = {}  # what was added, by the number of the watch
        self._ended = False

    def add(self, path: str) -> int:
        """Watch a folder, not its links. Returns the number of the watch; equal for one folder under two names."""
        number = next(self._numbers)
        watch = self._inotify.add_callback(os.fsencode(path), _FLAGS, _NOTHING, number)  # type: ignore[arg-type]
        if watch < 0:  # watchdog is silent about this one
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        self._known.setdefault(watch, []).append(number)
        return watch

    def remove(self, watch: int) -> None:
        """Watch a folder no longer. One that is gone is no error."""
        numbers = self._known.pop(watch, [])
        self._inotify.remove_callbacks([(watch, number) for number in numbers])  # type: ignore[misc]

    def read(self, seconds: float | None = None) -> list[FileEvent] | None:
        """Wait for changes; None once it was ended, which happens after `seconds` by itself."""
        timer = None if seconds is None else threading.Timer(seconds, self.end)
        if timer is not None:
            timer.start()
        changes: list[FileEvent] = []
        for event in self._inotify.read_events(event_buffer_size=1 << 18):
            if event.mask & IGNORED:
                self._inotify.handle_event(event)  # it forgets the watch
                self._known.pop(event.wd, None)
            change = FileEvent(event.wd, event.mask, os.fsdecode(event.name))
            if not changes or changes[-1] != change:  # a file that is being written says so again and again
                changes.append(change)
        if timer is not None:
            timer.cancel()
        return None if self._ended and not changes else changes

    def end(self) -> None:
        """Have `read` return None, and free everything."""
        self._ended = True
        self._inotify.close()


class _Nothing:
    """What watchdog calls for changes that `read` returns."""

    def on_event(self, event: object) -> None: ...
    def on_watch_deleted(self, watch: int) -> None: ...
    def on_queue_overflow(self) -> None: ...


_NOTHING = _Nothing()


def fair_share() -> int:
    """Return how many folders one daemon may watch: half of the user's, because others need some, too."""
    try:
        with open(_LIMIT, encoding="ascii") as file:
            return int(file.read()) // 2
    except (OSError, ValueError):
        return 4096
