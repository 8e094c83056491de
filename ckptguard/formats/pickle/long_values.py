"""Long byte strings and texts of a pickle. They stay in the file, and are read in blocks by what looks at them."""

from __future__ import annotations

import bisect
import codecs
from collections.abc import Iterator

from ckptguard.formats.structure import ReadProblem, Source
from ckptguard.storage.protocol import Entry

LONG = 1024  # bytes from which a value stays in the file
WINDOW = 4 << 20
MARGIN = 64 << 10  # no opcode needs more of the window, except those that make long values
BLOCK = 1 << 20
_READ_AGAIN = 8  # times the file's size
_ROOM = 64 << 20


class InMemory:
    """Bytes as a `Source`."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.entry = Entry(key="", kind="file", size=len(raw))

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes; fewer at the end."""
        return self.raw[offset : offset + length]


class Slice:
    """A part of a file as a `Source`."""

    def __init__(self, reader: Source, offset: int, size: int) -> None:
        self._reader, self._offset = reader, offset
        self.entry = Entry(key="", kind="file", size=size)

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes; fewer at the end."""
        return self._reader.read(self._offset + offset, max(min(length, self.entry.size - offset), 0))


class PickleStream:
    """The bytes of one or more pickles, of which one window is in memory: `data`, which begins at byte `begin`.

    What is long is read again later, mostly in order, so a block of it is kept. ReadProblem if a file lets itself be
    read again and again.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.size = source.entry.size
        self.begin, self.data = 0, source.raw if isinstance(source, InMemory) else b""
        self._first, self._block = 0, b""
        self._room = _READ_AGAIN * self.size + _ROOM

    def move(self, position: int) -> int:
        """Let the window hold what follows a position. Returns the position in the window."""
        end = self.begin + len(self.data)
        if not self.begin <= position or (end < self.size and position + MARGIN > end):
            self.begin, self.data = position, self.source.read(position, min(WINDOW, self.size - position))
        return position - self.begin

    def read(self, offset: int, length: int) -> bytes:
        """Return a part of what is long."""
        if self.begin <= offset <= offset + length <= self.begin + len(self.data):
            self._spend(length)
            return self.data[offset - self.begin : offset - self.begin + length]
        if not self._first <= offset <= offset + length <= self._first + len(self._block):
            size = min(max(length, BLOCK), self.size - offset)
            self._spend(size)
            self._first, self._block = offset, self.source.read(offset, size)
        return self._block[offset - self._first : offset - self._first + length]

    def _spend(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise ReadProblem("it holds the same bytes more often than ckptguard reads them", too_large=True)


class LongBytes:
    """A byte string that stayed in its file. It is a `Source` of the bytes."""

    __slots__ = ("_begin", "_size", "_stream")

    def __init__(self, stream: PickleStream, begin: int, size: int) -> None:
        self._stream, self._begin, self._size = stream, begin, size

    def __len__(self) -> int:
        return self._size

    @property
    def entry(self) -> Entry:
        """What a `Source` says of itself."""
        return Entry(key="", kind="file", size=self._size)

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes; fewer at the end."""
        return self._stream.read(self._begin + offset, max(min(length, self._size - offset), 0))

    def as_latin1(self) -> LongText:
        """Return the text of which each letter is one of these bytes."""
        return LongText(self._stream, self._begin, self._size, latin=True)


class LongText(LongBytes):
    """A text that stayed in its file: in UTF-8, or as Latin-1 bytes (`latin`).

    As a `Source` it is its bytes in Latin-1, the form of byte strings in protocol 2. `is_latin`: all letters have one.
    UnicodeDecodeError if it is not UTF-8 as Python reads it.
    """

    __slots__ = ("_end", "_marks", "is_latin")

    def __init__(self, stream: PickleStream, begin: int, size: int, *, latin: bool = False) -> None:
        super().__init__(stream, begin, size)
        self._end = begin + size
        # Letters before a byte, and that byte; none if each letter is a byte.
        self._marks: tuple[tuple[int, int], ...] = ()
        self.is_latin, count = True, 0
        marks: list[tuple[int, int]] = []
        for text, first in () if latin else self._texts(begin):
            marks.append((count, first))
            count += len(text)
            self.is_latin = self.is_latin and _is_latin(text)
        if not latin and count != size:
            self._marks, self._size = tuple(marks), count

    def _texts(self, first: int) -> Iterator[tuple[str, int]]:
        """Yield blocks of the text from a byte on, each with its first byte."""
        while first < self._end:
            raw = self._stream.read(first, min(BLOCK, self._end - first))
            text, used = codecs.utf_8_decode(raw, "surrogatepass", first + len(raw) == self._end)
            yield text, first
            first += used

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes; fewer at the end."""
        if not self._marks:
            return super().read(offset, length)
        length = max(min(length, self._size - offset), 0)
        count, first = self._marks[bisect.bisect_right(self._marks, (offset, self._end)) - 1]
        parts: list[bytes] = []
        for text, _ in self._texts(first):
            parts.append(text[max(offset - count, 0) : max(offset + length - count, 0)].encode("latin-1", "replace"))
            count += len(text)
            if count >= offset + length:
                break
        return b"".join(parts)


def _is_latin(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode("latin-1"))
    except UnicodeEncodeError:
        return False


def blocks_of(source: Source, offset: int, length: int) -> Iterator[bytes]:
    """Yield a part of a source in order. Each block but the last has a multiple of 16 bytes."""
    for begin in range(offset, offset + length, BLOCK):
        yield source.read(begin, min(BLOCK, offset + length - begin))


def head_of(raw: bytes | LongBytes, length: int) -> bytes:
    """Return the first bytes."""
    return raw.read(0, length) if isinstance(raw, LongBytes) else raw[:length]
