"""Fetch: write stored files into local ones. Somebody else reads back what was written."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, ThreadPoolExecutor, wait

from ckptguard.errors import DeniedError, StorageFullError
from ckptguard.scan import Progress
from ckptguard.storage import Reader, Storage
from ckptguard.storage.failures import FULL
from ckptguard.storage.read_ahead import CHUNK, IN_FLIGHT

_BLOCK = 4 << 20  # from a local disk, where one reader is enough
_FILES_AT_ONCE = 3  # while one is opened or put on the disk, others come


def fetch_files(storage: Storage, files: Sequence[tuple[str, str]], progress: Progress | None = None) -> None:
    """Copy objects to local paths (key, path) that must not exist yet; their folders are made. All are on the disk
    afterwards. Where one cannot be fetched the others are given up, and parts of them are left behind.

    From elsewhere they come in chunks, several at once, and each is written where it belongs as soon as it is there: a
    bounded number of bytes is in memory. StorageFullError and DeniedError name the local path. `progress` is called by
    several threads.
    """
    if storage.root is not None:
        chunks = _Chunks(progress)
        for key, target in files:
            _fetch(storage, key, target, chunks)
        return
    with (
        ThreadPoolExecutor(IN_FLIGHT, "ckptguard-fetch") as requests,
        ThreadPoolExecutor(_FILES_AT_ONCE, "ckptguard-fetch-file") as threads,
    ):
        chunks = _Chunks(progress, requests)
        try:
            fetching = [threads.submit(_fetch, storage, key, target, chunks) for key, target in files]
            wait(fetching, return_when=FIRST_EXCEPTION)
        finally:
            chunks.given_up.set()
            threads.shutdown(cancel_futures=True)
    for one in fetching:
        if not one.cancelled():
            one.result()


class _Chunks:
    """Copies the bytes of files piece by piece, in the threads of `requests` if there are any."""

    def __init__(self, progress: Progress | None, requests: Executor | None = None) -> None:
        self.given_up = threading.Event()
        self._progress, self._requests = progress, requests
        self._length = _BLOCK if requests is None else CHUNK

    def copy(self, reader: Reader, descriptor: int) -> None:
        size = reader.entry.size
        begins = range(0, size, self._length)
        if self._requests is None:
            for begin in begins:
                self._piece(reader, descriptor, begin, min(self._length, size - begin))
            return
        pieces = [
            self._requests.submit(self._piece, reader, descriptor, begin, min(self._length, size - begin))
            for begin in begins
        ]
        if wait(pieces, return_when=FIRST_EXCEPTION).not_done:
            self.given_up.set()
            wait(pieces)  # nobody may read or write on after the files are closed
        for piece in pieces:
            piece.result()

    def _piece(self, reader: Reader, descriptor: int, begin: int, length: int) -> None:
        if self.given_up.is_set():
            return
        data = reader.read(begin, length)
        left, position = memoryview(data), begin
        while left:
            written = os.pwrite(descriptor, left, position)
            left, position = left[written:], position + written
            if self._progress is not None:
                self._progress(written)
        _begin_writeback(descriptor, begin, len(data))


def _fetch(storage: Storage, key: str, target: str, chunks: _Chunks) -> None:
    if chunks.given_up.is_set():
        return
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with storage.open(key) as reader, open(target, "xb", buffering=0) as out:
            chunks.copy(reader, out.fileno())
            if not chunks.given_up.is_set():
                os.fsync(out.fileno())
    except OSError as error:
        if error.errno in FULL:
            raise StorageFullError(f"no space left for {target}", key=target) from error
        raise DeniedError(f"{target} cannot be written: {error.strerror}", key=target) from error


def _begin_writeback(descriptor: int, offset: int, length: int) -> None:
    """Have the system write these bytes to the disk from now on: so the fsync at the end has little left to wait for.
    To Linux, pages that are not needed any more are pages to write; they stay in memory until they are written."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # only a hint
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
