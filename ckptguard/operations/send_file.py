"""Send one file to another storage. Every byte is held against the manifest on its way there, and again when it is
read back from there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ckptguard.errors import StoppedError
from ckptguard.manifest import File
from ckptguard.scan import Progress
from ckptguard.scan.rate import Rate
from ckptguard.storage import Reader, Storage
from ckptguard.storage.etags import ExpectedTag
from ckptguard.storage.read_ahead import ReadAhead

BLOCK = 4 << 20
_AHEAD = 4  # blocks of a remote object that are asked for at once


class Pace:
    """How fast bytes may pass, and whether they still may: one for all files that are on their way together."""

    def __init__(
        self,
        rate: float | None = None,
        stop: threading.Event | None = None,
        progress: Progress | None = None,
        hold: Callable[[], None] | None = None,
    ) -> None:
        self._rate = Rate(rate, time.monotonic) if rate is not None else None
        self._stop = stop if stop is not None else threading.Event()
        self._progress = progress
        self._hold = hold  # waits while something more urgent goes on

    def passed(self, length: int, key: str) -> None:
        """So many bytes were read; returns when the next may be. StoppedError when called off."""
        if self._progress is not None:
            self._progress(length)
        if self._stop.wait(self._rate.take(length)) if self._rate is not None else self._stop.is_set():
            raise StoppedError(f"{key}: called off", key=key)
        if self._hold is not None:
            self._hold()


def send_file(
    source: Storage,
    source_key: str,
    target: Storage,
    target_key: str,
    file: File,
    pace: Pace,
    tag: ExpectedTag | None = None,
) -> str | None:
    """Put a copy of a sealed file under a free key. What is wrong with the source's bytes, and then nothing was put
    there; None if they are what was sealed. ObjectExistsError if the key is taken; ChangedWhileReadError.
    `tag` takes the bytes, too."""
    from ckptguard.scan.sealed_stream import SealedStream

    stream = SealedStream(file)
    with source.open(source_key) as reader:
        if reader.entry.size != file.size:
            return f"{file.path} has {reader.entry.size} bytes instead of {file.size}"
        with target.upload(target_key) as upload:
            for block in _blocks(reader, source.root is None, pace):
                stream.add(block)
                if tag is not None:
                    tag.add(block)
                upload.write(block)
            reader.check_unchanged()
            wrong = stream.wrong()
            if wrong is None:
                upload.commit()
    return wrong


def read_back(storage: Storage, key: str, file: File, pace: Pace) -> str | None:
    """What is wrong with the file under a key; None if every byte is as it was sealed. ObjectMissingError."""
    from ckptguard.scan.sealed_stream import SealedStream

    stream = SealedStream(file)
    with storage.open(key) as reader:
        if reader.entry.size != file.size:
            return f"{file.path} has {reader.entry.size} bytes instead of {file.size}"
        reader.done_with(0, file.size)  # what was written just now is to come from the disk, not from memory
        for block in _blocks(reader, storage.root is None, pace):
            stream.add(block)
        reader.check_unchanged()
    return stream.wrong()


def _blocks(reader: Reader, remote: bool, pace: Pace) -> Iterator[bytes]:
    """All blocks of a file in order; of a remote one, some are asked for ahead of their turn."""
    size, key = reader.entry.size, reader.entry.key
    with contextlib.ExitStack() as held:
        source = reader
        if remote and size > BLOCK:
            threads = held.enter_context(ThreadPoolExecutor(_AHEAD, thread_name_prefix="ckptguard-read"))
            source = held.enter_context(ReadAhead(reader, threads, chunk=BLOCK, in_flight=lambda: _AHEAD))
        for at in range(0, size, BLOCK):
            length = min(BLOCK, size - at)
            yield source.read(at, length)
            pace.passed(length, key)
            reader.done_with(at, length)
