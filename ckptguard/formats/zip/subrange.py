"""A range of a file, read as if it were a file of its own."""

from __future__ import annotations

from typing import Self

from ckptguard.storage.protocol import Entry, Reader

_AHEAD = 1 << 18
_EDGE = 1 << 13


class Subranges:
    """Hands out windows in the order of the file; small neighbours are fetched together."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.start = 0
        self.block = b""

    def window(self, offset: int, length: int) -> Subrange:
        """The range as a reader; it must lie inside the file."""
        if length > _AHEAD:
            head = self.reader.read(offset, _EDGE)
            return Subrange(self.reader, offset, length, head, self.reader.read(offset + length - _EDGE, _EDGE))
        if not self.start <= offset <= offset + length <= self.start + len(self.block):
            self.start = offset
            self.block = self.reader.read(offset, min(_AHEAD, self.reader.entry.size - offset))
        begin = offset - self.start
        return Subrange(self.reader, offset, length, self.block[begin : begin + length], b"")


class Subrange:
    """A `Reader` of `length` bytes from `offset`; its first and last bytes are in memory already."""

    def __init__(self, reader: Reader, offset: int, length: int, head: bytes, tail: bytes) -> None:
        self._reader = reader
        self._offset = offset
        self._head = head
        self._tail = tail
        self._tail_start = length - len(tail)
        self._length = length
        whole = reader.entry  # the window's has its own size
        self.entry = Entry(key=whole.key, kind="file", size=length, mtime_ns=whole.mtime_ns)

    @property
    def whole(self) -> bytes | None:
        """All of its bytes, if they are in memory."""
        return self._head if len(self._head) == self._length else None

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes of the window."""
        if offset + length <= len(self._head):
            return self._head[offset : offset + length]
        if offset >= self._tail_start:
            begin = offset - self._tail_start
            return self._tail[begin : begin + length]
        return self._reader.read(self._offset + offset, length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from the window."""
        self._reader.read_into(self._offset + offset, buffer)

    def check_unchanged(self) -> None:
        """The file as a whole."""
        self._reader.check_unchanged()

    def done_with(self, offset: int, length: int) -> None:
        """A range of the window."""
        self._reader.done_with(self._offset + offset, length)

    def close(self) -> None:
        """The file stays open: it belongs to whoever opened it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
