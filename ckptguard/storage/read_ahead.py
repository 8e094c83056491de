"""Read front to back with one request per chunk: the next chunks are fetched while one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

from ckptguard.storage.protocol import Reader

CHUNK = 16 << 20  # one request: large enough to outweigh the latency
IN_FLIGHT = 4  # chunks: enough to keep a store and this process busy, in 64 MiB of memory


class ReadAhead(Reader):
    """A `Reader` for one thread that reads a file in order. `executor` fetches up to `in_flight()` chunks ahead.

    Reads out of order go to the reader directly. `close` ends the fetching, and leaves the reader open.
    """

    def __init__(
        self,
        reader: Reader,
        executor: Executor,
        *,
        chunk: int = CHUNK,
        in_flight: Callable[[], int] = lambda: IN_FLIGHT,
    ) -> None:
        self.entry, self._reader, self._executor = reader.entry, reader, executor
        self._chunk, self._in_flight = chunk, in_flight
        self._end = 0  # of what was requested
        self._coming: deque[tuple[int, Future[bytes]]] = deque()  # each with its offset

    def read(self, offset: int, length: int) -> bytes:
        coming = self._coming_at(offset)
        if coming is not None and coming[0] == offset and len(chunk := coming[1].result()) == length:
            return chunk  # as it came: a copy would cost more than its digest
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        while len(buffer):
            coming = self._coming_at(offset)
            if coming is None:
                self._reader.read_into(offset, buffer)
                return
            begin, future = coming
            piece = memoryview(future.result())[offset - begin : offset - begin + len(buffer)]
            buffer[: len(piece)] = piece
            offset, buffer = offset + len(piece), buffer[len(piece) :]

    def check_unchanged(self) -> None:
        self._reader.check_unchanged()

    def done_with(self, offset: int, length: int) -> None:
        self._reader.done_with(offset, length)

    def close(self) -> None:
        wait([future for _, future in self._coming if not future.cancel()])  # the reader may be closed next
        self._coming.clear()

    def _coming_at(self, offset: int) -> tuple[int, Future[bytes]] | None:
        """Return the requested chunk that contains this offset, and drop earlier ones."""
        self._fetch()
        while self._coming and self._coming[0][0] + self._chunk <= offset:
            self._coming.popleft()[1].result()
            self._fetch()
        if not self._coming or not self._coming[0][0] <= offset < self._end:
            return None
        return self._coming[0]

    def _fetch(self) -> None:
        size = self.entry.size
        while self._end < size and len(self._coming) < self._in_flight():
            length = min(self._chunk, size - self._end)
            self._coming.append((self._end, self._executor.submit(self._reader.read, self._end, length)))
            self._end += length
