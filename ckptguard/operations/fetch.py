"""Fetch: write a stored file into a local one. Somebody else reads back what was written."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from ckptguard.errors import DeniedError, StorageFullError
from ckptguard.scan import Progress
from ckptguard.storage import Reader, Storage
from ckptguard.storage.failures import FULL
from ckptguard.storage.read_ahead import CHUNK, IN_FLIGHT

_BLOCK = 4 << 20  # from a local disk, where one reader is enough


def fetch_file(storage: Storage, key: str, target: str, progress: Progress | None = None) -> None:
    """Copy an object to a local path that must not exist yet; its folders are made. It is on the disk afterwards.

    From elsewhere it comes in chunks, several at once, and each is written where it belongs as soon as it is there: a
    bounded number of bytes is in memory. StorageFullError and DeniedError name the local path.
    """
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with storage.open(key) as reader, open(target, "xb", buffering=0) as out:
            _copy(reader, out.fileno(), progress, at_once=1 if storage.root is not None else IN_FLIGHT)
            os.fsync(out.fileno())
    except OSError as error:
        if error.errno in FULL:
            raise StorageFullError(f"no space left for {target}", key=target) from error
        raise DeniedError(f"{target} cannot be written: {error.strerror}", key=target) from error


def _copy(reader: Reader, descriptor: int, progress: Progress | None, *, at_once: int) -> None:
    size = reader.entry.size
    length = CHUNK if at_once > 1 else _BLOCK
    given_up = threading.Event()

    def copy(begin: int) -> None:
        if given_up.is_set():
            return
        data = reader.read(begin, min(length, size - begin))
        left, position = memoryview(data), begin
        while left:
            written = os.pwrite(descriptor, left, position)
            left, position = left[written:], position + written
            if progress is not None:
                progress(written)
        _begin_writeback(descriptor, begin, len(data))

    if at_once == 1 or size <= length:
        for begin in range(0, size, length):
            copy(begin)
        return
    with ThreadPoolExecutor(at_once, "ckptguard-fetch") as threads:
        try:
            pieces = [threads.submit(copy, begin) for begin in range(0, size, length)]
            wait(pieces, return_when=FIRST_EXCEPTION)
        finally:
            given_up.set()
            threads.shutdown(cancel_futures=True)
    for piece in pieces:
        if not piece.cancelled():
            piece.result()


def _begin_writeback(descriptor: int, offset: int, length: int) -> None:
    """Have the system write these bytes to the disk from now on: so the fsync at the end has little left to wait for.
    To Linux, pages that are not needed any more are pages to write; they stay in memory until they are written."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # only a hint
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
