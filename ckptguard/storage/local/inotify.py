"""Linux's inotify, as far as the daemon and `doctor` need it: one descriptor for any number of folders."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
from collections.abc import Iterator

import msgspec

CREATE, DELETE, MOVED_FROM, MOVED_TO = 0x100, 0x200, 0x40, 0x80
MODIFY, ATTRIB, CLOSE_WRITE = 0x2, 0x4, 0x8
DELETE_SELF, MOVE_SELF = 0x400, 0x800
OVERFLOW, IGNORED, IS_FOLDER = 0x4000, 0x8000, 0x40000000
_ONLY_FOLDERS, _NO_LINKS, _NOT_UNLINKED = 0x01000000, 0x02000000, 0x04000000
_WANTED = CREATE | DELETE | MOVED_FROM | MOVED_TO | MODIFY | ATTRIB | CLOSE_WRITE | DELETE_SELF | MOVE_SELF
_HEAD = struct.Struct("iIII")
_LIMIT = "/proc/sys/fs/inotify/max_user_watches"


class Change(msgspec.Struct, frozen=True):
    """What happened to `name` in a watched folder, or to the folder itself."""

    watch: int
    mask: int
    name: str


class Inotify:
    """An inotify instance. Raises OSError if the system has none left, or no inotify at all."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        try:
            self._descriptor = self._checked(self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        except AttributeError as error:
            raise OSError(errno.ENOSYS, "this system has no inotify") from error
        self._ended, self._end = os.pipe()

    def add(self, path: str) -> int:
        """Watch a folder, not its links. Returns the number of the watch; equal for one folder under two names."""
        flags = _WANTED | _ONLY_FOLDERS | _NO_LINKS | _NOT_UNLINKED
        return self._checked(self._library.inotify_add_watch(self._descriptor, os.fsencode(path), flags))

    def remove(self, watch: int) -> None:
        """Watch a folder no longer. One that is gone is no error."""
        self._library.inotify_rm_watch(self._descriptor, watch)

    def read(self, seconds: float | None = None) -> list[Change] | None:
        """Wait for changes, at most so long; None once it was ended."""
        ready, _, _ = select.select([self._descriptor, self._ended], [], [], seconds)
        if self._ended in ready:
            return None
        try:
            data = os.read(self._descriptor, 1 << 18)
        except BlockingIOError:
            return []
        return list(_parsed(data))

    def end(self) -> None:
        """Have `read` return None."""
        os.close(self._end)

    def close(self) -> None:
        """Free everything. Only its reader calls it, after the end."""
        os.close(self._descriptor)
        os.close(self._ended)

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result


def fair_share() -> int:
    """Return how many folders one daemon may watch: half of the user's, because others need some, too."""
    try:
        with open(_LIMIT, encoding="ascii") as file:
            return int(file.read()) // 2
    except (OSError, ValueError):
        return 4096


def _parsed(data: bytes) -> Iterator[Change]:
    place, before = 0, None
    while place < len(data):
        watch, mask, _, length = _HEAD.unpack_from(data, place)
        name = data[place + _HEAD.size : place + _HEAD.size + length].rstrip(b"\0")
        place += _HEAD.size + length
        if (watch, mask, name) != before:  # a file that is being written says so again and again
            yield Change(watch, mask, os.fsdecode(name))
        before = (watch, mask, name)
