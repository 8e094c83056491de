"""Bytes as a reader: what formats read, without a file."""

from __future__ import annotations

from ckptguard.errors import ChangedWhileReadError
from ckptguard.storage.protocol import Entry


class MemoryReader:
    """A `Reader` over bytes; a read that reaches out of them is the error of a file that ends too early."""

    def __init__(self, name: str, data: bytes) -> None:
        self.data = data
        self.entry = Entry(key=name, kind="file", size=len(data))

    def read(self, offset: int, length: int) -> bytes:
        """The range, or the error of a reader that meets the end."""
        if offset < 0 or length < 0 or offset + length > len(self.data):
            raise ChangedWhileReadError("ends", key=self.entry.key)
        return self.data[offset : offset + length]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """The same, into a buffer."""
        buffer[:] = self.read(offset, len(buffer))

    def check_unchanged(self) -> None:
        """Bytes do not change."""

    def done_with(self, offset: int, length: int) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> MemoryReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
