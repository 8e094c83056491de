"""The common part of remote storages: nothing is cached, and a short answer is never data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from ckptguard.errors import ChangedWhileReadError, DeniedError, ObjectMissingError, TransientError
from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import Enter, Entry, Reader, unread_folder
from ckptguard.values.ids import escape


def listed_by_levels(
    prefix: str, level: Callable[[str], list[Entry]], where: str, *, recursive: bool, enter: Enter | None, unread: bool
) -> list[Entry]:
    """List as `Storage.list` does, unsorted, with `level` for one folder after another."""
    found: list[Entry] = []
    pending = [prefix]
    while pending:
        folder = pending.pop()
        try:
            with translated(folder, where):
                entries = level(folder)
        except DeniedError as error:
            if not (unread and folder):
                raise
            found.append(unread_folder(folder, error))
            continue
        for entry in entries:
            if not recursive or entry.kind != "folder":
                found.append(entry)
            elif enter is None or enter(entry.key):
                pending.append(entry.key)
    return found


def changed(key: str) -> ChangedWhileReadError:
    """Return the error that an object is another one now."""
    return ChangedWhileReadError(f"{escape(key)} changed while it was read", key=key)


class RangedReader(Reader):
    """A `Reader` that requests ranges of one object. `stat_now` shows whether it is still the opened object."""

    def __init__(self, entry: Entry, where: str, stat_now: Callable[[str], Entry]) -> None:
        self.entry, self._where, self._stat_now = entry, where, stat_now

    @abstractmethod
    def _answer(self, offset: int, length: int) -> bytes:
        """Return the storage's answer, which may be too short. FileNotFoundError if the object is gone."""

    def read(self, offset: int, length: int) -> bytes:
        key = self.entry.key
        if offset + length > self.entry.size:
            raise ChangedWhileReadError(f"{escape(key)} ends earlier than expected", key=key)
        if length == 0:
            return b""
        with translated(key, self._where):
            try:
                data = self._answer(offset, length)
            except FileNotFoundError as error:
                raise ChangedWhileReadError(f"{escape(key)} vanished while it was read", key=key) from error
        if len(data) != length:
            self.check_unchanged()  # otherwise the answer was cut, not the object
            raise TransientError(f"{escape(key)}: asked for {length} bytes, got {len(data)}", key=key)
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, len(buffer))

    def check_unchanged(self) -> None:
        key = self.entry.key
        try:
            present = self._stat_now(key)
        except ObjectMissingError as error:
            raise ChangedWhileReadError(f"{escape(key)} vanished while it was read", key=key) from error
        if present.kind != "file" or present.signature != self.entry.signature:
            raise changed(key)
