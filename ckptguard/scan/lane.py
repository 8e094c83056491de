"""What one thread needs to pass over bytes: a few blocks that are used again and again, and its digest threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blake3 import blake3

from ckptguard.scan.digest_threads import DigestThreads, Hasher
from ckptguard.scan.pass_over import Pass
from ckptguard.storage.protocol import Reader

BLOCK = 512 << 10  # it stays in a core's own cache from reading to the last look at it
REMOTE_BLOCK = 2 << 20  # each is one request
RING = 4  # blocks: how far reading may be ahead of the slowest whole-file digest; few, so that they stay in cache

Done = Callable[[int, int], None]  # offset and length of what was read and is not needed again


class Lane:
    """Serves one file, or one part of one, at a time. `threaded`: whole-file digests get threads of their own."""

    def __init__(self, block: int, *, threaded: bool) -> None:
        self._block = block
        self._threaded = threaded
        self._buffers: list[memoryview] = []
        self._threads: DigestThreads | None = None

    def run(self, reader: Reader, one_pass: Pass, hashers: Sequence[Hasher], done: Done) -> None:
        """Read a part once, block by block, into its pass and into whole-file digests."""
        position = one_pass.part.begin
        threads = self._threads_for(len(hashers)) if one_pass.part.end - position > self._block else None
        for number, end in enumerate(one_pass.ends(self._block)):
            if threads is not None:
                threads.wait_for_room()
            block = self._buffer(0 if threads is None else number % RING)[: end - position]
            reader.read_into(position, block)
            if threads is not None:
                threads.feed(hashers, block)
            else:
                for hasher in hashers:
                    hasher.update(block)
            one_pass.add(block)
            done(position, end - position)
            position = end
        if threads is not None:
            threads.drain()

    def hash_range(self, reader: Reader, begin: int, end: int, hasher: blake3, done: Done) -> None:
        """Read a range once, into one digest."""
        for position in range(begin, end, self._block):
            block = self._buffer(0)[: min(self._block, end - position)]
            reader.read_into(position, block)
            hasher.update(block)
            done(position, len(block))

    def _threads_for(self, count: int) -> DigestThreads | None:
        if self._threaded and count and self._threads is None:
            self._threads = DigestThreads(count, RING)
        return self._threads if count else None

    def _buffer(self, number: int) -> memoryview:
        while len(self._buffers) <= number:
            self._buffers.append(memoryview(bytearray(self._block)))
        return self._buffers[number]

    def close(self) -> None:
        """End the threads, also in the middle of a file."""
        if self._threads is not None:
            self._threads.close()
