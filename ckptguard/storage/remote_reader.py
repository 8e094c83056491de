"""Reading one object of an fsspec file system."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from ckptguard.errors import ChangedWhileReadError, ObjectMissingError, TransientError
from ckptguard.names import escape
from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import Entry


class RemoteReader:
    """A `Reader` by ranged reads; there is no handle, so a replaced object shows only in `check_unchanged`."""

    def __init__(
        self,
        file_system: Callable[[], Any],
        path: str,
        entry: Entry,
        where: str,
        stat_now: Callable[[str], Entry],
    ) -> None:
        self._fs = file_system
        self._path = path
        self._entry = entry
        self._where = where
        self._stat_now = stat_now

    @property
    def entry(self) -> Entry:
        return self._entry

    def read(self, offset: int, length: int) -> bytes:
        key = self._entry.key
        if offset + length > self._entry.size:
            raise ChangedWhileReadError(f"{escape(key)} ends earlier than expected", key=key)
        if length == 0:
            return b""
        with translated(key, self._where):
            try:
                data = self._fs().cat_file(self._path, start=offset, end=offset + length)
            except FileNotFoundError as error:
                raise ChangedWhileReadError(f"{escape(key)} vanished while it was read", key=key) from error
        if len(data) != length:
            self.check_unchanged()  # else it is the answer that was cut, and not the object
            raise TransientError(f"{escape(key)}: asked for {length} bytes, got {len(data)}", key=key)
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, len(buffer))

    def check_unchanged(self) -> None:
        key = self._entry.key
        try:
            present = self._stat_now(key)
        except ObjectMissingError as error:
            raise ChangedWhileReadError(f"{escape(key)} vanished while it was read", key=key) from error
        if present.kind != "file" or present.signature != self._entry.signature:
            raise ChangedWhileReadError(f"{escape(key)} changed while it was read", key=key)

    def done_with(self, offset: int, length: int) -> None:
        """Nothing is cached here."""

    def close(self) -> None:
        """There is no handle."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
