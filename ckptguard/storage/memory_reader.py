"""A file that is held in memory."""

from __future__ import annotations

from ckptguard.errors import ChangedWhileReadError
from ckptguard.storage.protocol import Entry, Reader
from ckptguard.values.ids import escape


class MemoryReader(Reader):
    """Reads bytes that are held: nothing changes them, and they stay after `close`."""

    def __init__(self, entry: Entry, data: bytearray | memoryview) -> None:
        self.entry, self.data = entry, data

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._range(offset, length))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._range(offset, len(buffer))

    def check_unchanged(self) -> None:
        pass

    def _range(self, offset: int, length: int) -> memoryview:
        if offset + length > len(self.data):
            raise ChangedWhileReadError(f"{escape(self.entry.key)} ends earlier than expected", key=self.entry.key)
        return memoryview(self.data)[offset : offset + length]
