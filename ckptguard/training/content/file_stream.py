"""A new file, written front to back past the page cache, while the caller prepares the next block."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from queue import SimpleQueue

from ckptguard.storage.failures import translated
from ckptguard.training.content.tensor_bytes import copy_bytes

BLOCK = 4 * 1024**2
_BLOCKS = 3  # one is filled, one is written, one waits


class FileStream:
    """Appends bytes to an empty file that the caller opened for writing. `close` must be called, also after a failure.

    Where the file system allows it the page cache is left alone: what is written to be durable would only push out
    what training reads, and be copied once more. StorageFullError and its kinds come out of `write` and `finish`.
    """

    def __init__(self, descriptor: int, *, key: str, where: str) -> None:
        self._descriptor, self._key, self._where = descriptor, key, where
        self._direct = _set_direct(descriptor, wanted=True)
        self._free: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(_BLOCKS):
            self._free.put(mmap.mmap(-1, BLOCK))  # aligned to pages, as direct writes need it
        self._full: SimpleQueue[tuple[mmap.mmap, int] | None] = SimpleQueue()
        self._block, self._filled = self._free.get(), 0
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._write_blocks, name="ckptguard-write", daemon=True)
        self._thread.start()

    def write(self, data: memoryview) -> None:
        """Copy bytes to the end; they may change afterwards."""
        while len(data):
            count = min(len(data), BLOCK - self._filled)
            copy_bytes(memoryview(self._block)[self._filled : self._filled + count], data[:count])
            self._filled += count
            data = data[count:]
            if self._filled == BLOCK:
                self._hand_over()
                self._block = self._free.get()
                self._raise_failure()

    def finish(self) -> None:
        """Return once everything is on the disk."""
        self._hand_over()
        self.close()
        self._raise_failure()
        with translated(self._key, self._where):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """End the thread. The descriptor stays the caller's."""
        if not self._closed:
            self._closed = True
            self._full.put(None)
            self._thread.join()

    def _hand_over(self) -> None:
        self._full.put((self._block, self._filled))
        self._filled = 0

    def _raise_failure(self) -> None:
        if self._failure is not None:
            with translated(self._key, self._where):
                raise self._failure

    def _write_blocks(self) -> None:
        while (given := self._full.get()) is not None:
            block, length = given
            if self._failure is None:
                try:
                    self._write(memoryview(block)[:length])
                except BaseException as error:
                    self._failure = error
            self._free.put(block)

    def _write(self, left: memoryview) -> None:
        if len(left) < BLOCK:
            self._direct = self._direct and not _set_direct(self._descriptor, wanted=False)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except OSError as error:
                # A file system may want other alignments, or take a part of a block: go on through the page cache.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = False
                _set_direct(self._descriptor, wanted=False)


def _set_direct(descriptor: int, *, wanted: bool) -> bool:
    """Switch direct writing; returns whether that was done."""
    flag = getattr(os, "O_DIRECT", 0)
    if flag:
        import fcntl

        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
            return True
    return False
