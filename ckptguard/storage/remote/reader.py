"""Reading one object of an fsspec file system."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from ckptguard.storage.protocol import Entry
from ckptguard.storage.ranged_reader import RangedReader


class RemoteReader(RangedReader):
    """A `Reader` by ranged reads; there is no handle, so a replaced object shows only in `check_unchanged`."""

    def __init__(
        self, file_system: Callable[[], Any], path: str, entry: Entry, where: str, stat_now: Callable[[str], Entry]
    ) -> None:
        super().__init__(entry, where, stat_now)
        self._fs = file_system
        self._path = path

    def _answer(self, offset: int, length: int) -> bytes:
        return cast("bytes", self._fs().cat_file(self._path, start=offset, end=offset + length))
