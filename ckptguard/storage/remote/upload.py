"""Write an object of any length to an fsspec file system, in parts, with bounded memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from ckptguard.errors import StorageError
from ckptguard.storage.failures import translated
from ckptguard.storage.protocol import Upload
from ckptguard.storage.remote.multipart import MultipartUpload
from ckptguard.storage.retries import Retries

T = TypeVar("T")

SMALLEST_PART = 8 << 20  # S3 refuses parts below 5 MiB
_PARTS_OF_A_SIZE = 1000  # stores allow 10 000 parts at most, so parts double in size every thousand


def part_size(number: int) -> int:
    """Return the size of the part with this number, counted from 0. The last one may be shorter."""
    return SMALLEST_PART << (number // _PARTS_OF_A_SIZE)


class RemoteUpload(Upload):
    """An `Upload`: one put for what fits into one part, otherwise parts that are joined at the commit."""

    def __init__(
        self,
        key: str,
        where: str,
        begin: Callable[[], MultipartUpload],
        put_whole: Callable[[bytes], None],
        refuse_taken: Callable[[], None],
        *,
        replace: bool,
        retries: Retries,
    ) -> None:
        self._key, self._where, self._replace, self._retries = key, where, replace, retries
        self._begin, self._put_whole, self._refuse_taken = begin, put_whole, refuse_taken
        self._buffer = bytearray()
        self._parts: MultipartUpload | None = None
        self._count = 0
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: set[Future[None]] = set()
        self._over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._over:
            raise StorageError(f"{self._key}: this upload has already ended", key=self._key)
        if isinstance(data, bytes) and not self._buffer and len(data) == part_size(self._count):
            self._send(data)  # send the part itself: nobody changes it, so no copy is needed
            return
        left = memoryview(data).cast("B")
        while left:
            room = part_size(self._count) - len(self._buffer)
            self._buffer += left[:room]
            left = left[room:]
            if len(self._buffer) == part_size(self._count):
                self._send_buffer()

    def commit(self) -> None:
        try:
            with translated(self._key, self._where):
                self._refuse_taken()
                if self._parts is None:
                    self._again(lambda: self._put_whole(bytes(self._buffer)))
                else:
                    if self._buffer:
                        self._send_buffer()
                    while self._under_way:
                        self._wait()
                    self._refuse_taken()
                    parts = self._parts
                    self._again(lambda: parts.finish(exclusive=not self._replace))
                    self._parts = None
        finally:
            self.abort()

    def abort(self) -> None:
        self._over = True
        self._buffer.clear()
        for future in self._under_way:
            future.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        parts, self._parts = self._parts, None
        if parts is not None:
            # The caller has the error that led here. Parts left behind are invisible.
            with contextlib.suppress(Exception):
                parts.abandon()

    def _send_buffer(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        self._send(data)

    def _send(self, data: bytes) -> None:
        with translated(self._key, self._where):
            if self._parts is None:
                self._parts = self._again(self._begin)
            number, self._count = self._count, self._count + 1
            if self._parts.parallel == 1:
                self._put(self._parts, number, data)
                return
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._parts.parallel, thread_name_prefix="ckptguard-upload")
            while len(self._under_way) >= self._parts.parallel:
                self._wait()
            try:
                self._under_way.add(self._threads.submit(self._put, self._parts, number, data))
            except RuntimeError:  # the interpreter is ending: executors take no more work, but a save may be running
                self._put(self._parts, number, data)

    def _put(self, parts: MultipartUpload, number: int, data: bytes) -> None:
        # A file that is held open takes its bytes once. A numbered part may be put again.
        if parts.parallel == 1:
            parts.put(number, data)
        else:
            self._again(lambda: parts.put(number, data))

    def _again(self, act: Callable[[], T]) -> T:
        def attempt() -> T:
            with translated(self._key, self._where):
                return act()

        return self._retries.run(self._key, attempt)

    def _wait(self) -> None:
        done, self._under_way = wait(self._under_way, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
