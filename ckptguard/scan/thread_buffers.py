"""What one thread needs for a pass: a few reused blocks, and its digest threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from ckptguard.scan.byte_pass import BytePass
from ckptguard.scan.whole_file_digests import DigestThreads, Hasher
from ckptguard.storage.protocol import Reader

BLOCK = 512 << 10  # small enough for a core's own cache
REMOTE_BLOCK = 2 << 20  # each is one request
CHUNK = 2 << 20  # a digest thread's portion: waking it for each block would take a tenth of the scan
RING = 2  # chunks that reading may be ahead of the slowest whole-file digest; few, to stay in cache

Done = Callable[[int, int], None]  # offset and length of bytes that are not needed again


@dataclass
class ThreadBuffers:
    """Serves one file, or one part of one, at a time. `threaded`: each whole-file digest gets a thread."""

    block: int
    threaded: bool
    _buffers: list[memoryview] = field(default_factory=list)
    _threads: DigestThreads | None = None

    def run(self, reader: Reader, one_pass: BytePass, hashers: Sequence[Hasher], done: Done) -> None:
        """Read a part once, block by block, into its pass and the whole-file digests."""
        small = one_pass.part.end - one_pass.part.begin <= self.block
        threads = None if small else self._threads_for(len(hashers))
        length = self.block if threads is None else max(CHUNK, self.block)
        position = one_pass.part.begin
        number = filled = 0
        chunk = self._buffer(0, length)
        for end in one_pass.ends(self.block):
            if filled + end - position > length:
                self._feed(threads, hashers, chunk[:filled])
                number, filled = number + 1, 0
                chunk = self._buffer(0 if threads is None else number % RING, length)
            if threads is not None and filled == 0:
                threads.wait_for_room()
            block = chunk[filled : filled + end - position]
            reader.read_into(position, block)
            one_pass.add(block)
            done(position, len(block))
            filled += len(block)
            position = end
        self._feed(threads, hashers, chunk[:filled])
        if threads is not None:
            threads.drain()

    def _feed(self, threads: DigestThreads | None, hashers: Sequence[Hasher], chunk: memoryview) -> None:
        if threads is not None:
            threads.feed(hashers, chunk)
            return
        for hasher in hashers:
            hasher.update(chunk)

    def hash_range(self, reader: Reader, begin: int, end: int, hasher: blake3, done: Done) -> None:
        """Read a range once, into one digest."""
        for position in range(begin, end, self.block):
            block = self._buffer(0, min(self.block, end - position))
            reader.read_into(position, block)
            hasher.update(block)
            done(position, len(block))

    def _threads_for(self, count: int) -> DigestThreads | None:
        if self.threaded and count and self._threads is None:
            self._threads = DigestThreads(count, RING)
        return self._threads if count else None

    def _buffer(self, number: int, length: int) -> memoryview:
        while len(self._buffers) <= number:
            self._buffers.append(memoryview(bytearray(max(CHUNK, self.block) if self.threaded else self.block)))
        return self._buffers[number][:length]

    def close(self) -> None:
        """End the threads, also in the middle of a file."""
        if self._threads is not None:
            self._threads.close()
