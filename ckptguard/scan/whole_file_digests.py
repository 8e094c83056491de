"""Whole-file digests: by name, and in threads that are fed with reused blocks."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from blake3 import blake3

if TYPE_CHECKING:
    from queue import SimpleQueue

GIT_SHA1 = "git-sha1"


class Hasher(Protocol):
    """The interface of hashlib's objects."""

    def update(self, data: memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


def new_hasher(name: str, size: int) -> Hasher:
    """Return a hasher for a file of `size` bytes.

    "git-sha1" is git's name of a file: SHA-1 over its kind, size and bytes. "blake2b-256" is BLAKE2b with that many
    bits. Any other name but "blake3" is hashlib's.
    """
    if name == "blake3":
        return blake3()
    if name.startswith("blake2b-"):
        return hashlib.blake2b(digest_size=int(name.removeprefix("blake2b-")) // 8, usedforsecurity=False)
    if name == GIT_SHA1:
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return hashlib.new(name, usedforsecurity=False)


class DigestThreads:
    """`count` threads, each computing one digest of the current file.

    A block may be overwritten after `depth - 1` more blocks were fed; `feed` waits for that. A thread's error is raised
    by the next `feed` or `drain`. The thread keeps taking blocks, so that no wait lasts forever. Leaving the context
    ends them.
    """

    def __init__(self, count: int, depth: int) -> None:
        from queue import SimpleQueue  # a small file's digests need no threads

        self._depth = depth
        self._queues: list[SimpleQueue[tuple[Hasher, memoryview] | None]] = [SimpleQueue() for _ in range(count)]
        # A token for each free block: waiting for a queue costs less than for a semaphore, which is written in Python.
        self._free: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(count)]
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(queue, free), name="ckptguard-digest", daemon=True)
            for queue, free in zip(self._queues, self._free, strict=True)
        ]
        for free, thread in zip(self._free, self._threads, strict=True):
            self._set_free(free)
            thread.start()

    def wait_for_room(self) -> None:
        """Wait until no thread needs the block that was fed `depth` blocks ago."""
        for free in self._free:
            free.get()
        self._raise()

    def feed(self, hashers: Sequence[Hasher], block: memoryview) -> None:
        """Give each thread its digest's next block, after `wait_for_room`."""
        for queue, hasher in zip(self._queues, hashers, strict=True):
            queue.put((hasher, block))

    def drain(self) -> None:
        """Wait until everything fed is in the digests."""
        for free in self._free:
            for _ in range(self._depth):
                free.get()
            self._set_free(free)
        self._raise()

    def _set_free(self, free: SimpleQueue[None]) -> None:
        for _ in range(self._depth):
            free.put(None)

    def _serve(self, queue: SimpleQueue[tuple[Hasher, memoryview] | None], free: SimpleQueue[None]) -> None:
        while (item := queue.get()) is not None:
            try:
                if self._error is None:
                    item[0].update(item[1])
            except BaseException as error:
                self._error = error
            del item
            free.put(None)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the threads, also in the middle of a file."""
        self._error = self._error or InterruptedError()  # queued blocks are not worth their time
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()
