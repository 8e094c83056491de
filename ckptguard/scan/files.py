"""One pass over files: every byte is read once, several files in parallel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from blake3 import blake3

from ckptguard.scan.one_file import FileScanner, Stopped, raise_first
from ckptguard.scan.options import Progress, ScanOptions, workers_of
from ckptguard.scan.result import Scan, ScannedFile
from ckptguard.scan.thread_buffers import BLOCK
from ckptguard.storage.failures import machine_trouble
from ckptguard.storage.protocol import Storage

if TYPE_CHECKING:
    from concurrent.futures import Future


def scan_files(
    storage: Storage, keys: Sequence[str], options: ScanOptions | None = None, progress: Progress | None = None
) -> Scan:
    """Scan files. The result has the given order, and is the same with any number of workers.

    Bad bytes are in the result. An error says nothing about the bytes: StorageError, or ChangedWhileReadError for a
    file that was written, replaced or removed meanwhile.
    """
    started = time.perf_counter()
    options = options or ScanOptions()
    workers = workers_of(options.workers)
    try:
        with closing(FileScanner(storage, options, progress, workers)) as scanner:
            files = _side_by_side(storage, keys, options, scanner, workers)
    except (MemoryError, RuntimeError) as error:
        reported = machine_trouble(error)
        if reported is None:
            raise
        raise reported from error
    return Scan(files=files, seconds=time.perf_counter() - started)


def _side_by_side(
    storage: Storage, keys: Sequence[str], options: ScanOptions, scanner: FileScanner, workers: int
) -> tuple[ScannedFile, ...]:
    large_first = _large_first(storage, keys) if workers > 1 and len(keys) > 1 and not options.structure_only else []
    if len(large_first) < 2:
        return tuple(scanner(key) for key in keys)
    # Not for one file: importing it takes as long as a small file.
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

    futures: dict[str, Future[ScannedFile]] = {}
    with ThreadPoolExecutor(min(workers, len(large_first)), "ckptguard-scan") as executor:
        try:
            for key in dict.fromkeys((*large_first, *keys)):
                futures[key] = executor.submit(scanner, key)
            wait(futures.values(), return_when=FIRST_EXCEPTION)
        finally:
            if any(not f.done() for f in futures.values()):
                scanner.stop()
                executor.shutdown(cancel_futures=True)
    raise_first([_error_of(futures[key]) for key in keys])
    return tuple(futures[key].result() for key in keys)


def _error_of(future: Future[ScannedFile]) -> BaseException | None:
    from concurrent.futures import CancelledError

    try:
        return future.exception()
    except CancelledError:
        return Stopped()


def _large_first(storage: Storage, keys: Sequence[str]) -> list[str]:
    """Return the files that are worth a thread, the largest first, so that none is left for last.

    On remote storage that is all of them, because asking for a size costs as much as opening.
    """
    if storage.root is None:
        return list(keys)
    sizes = {key: storage.stat(key).size for key in keys}
    return sorted((key for key in keys if sizes[key] > BLOCK), key=lambda key: -sizes[key])


def digest_places(storage: Storage, key: str, places: Sequence[tuple[int, int]]) -> tuple[str | None, ...]:
    """Return the BLAKE3 of (offset, length) ranges of a file; None for a range beyond its end."""
    buffer = memoryview(bytearray(BLOCK))
    digests: list[str | None] = []
    with storage.open(key) as reader:
        for offset, length in places:
            if offset + length > reader.entry.size:
                digests.append(None)
                continue
            hasher = blake3()
            for begin in range(offset, offset + length, BLOCK):
                block = buffer[: min(BLOCK, offset + length - begin)]
                reader.read_into(begin, block)
                hasher.update(block)
            digests.append(hasher.hexdigest())
        reader.check_unchanged()
    return tuple(digests)
