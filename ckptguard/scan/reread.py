"""Read a sealed file again, from the disk and not from the page cache, at a pace that others set."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import msgspec

from ckptguard.errors import ObjectMissingError, RecordsError
from ckptguard.manifest import File
from ckptguard.scan.rate import Rate
from ckptguard.storage.protocol import Storage

_TICK = 0.1  # seconds after which someone who waits for its turn looks whether it is still wanted
_LOOK = 5.0  # seconds between two looks whether the file is still there: an open one keeps its space when removed


class ReadingStopped(Exception):
    """Whoever sets the pace wants no more to be read. It says nothing about the bytes."""


class Pace:
    """How fast is read, by all that share it, and whether at all: `hold` is called before each block; it may wait, and
    raises ReadingStopped to end the reading."""

    def __init__(self, rate: float | None = None, hold: Callable[[], None] = lambda: None) -> None:
        self._rate = None if rate is None else Rate(rate, time.monotonic)
        self._hold = hold

    def before(self) -> None:
        """Wait until a block may be read."""
        self._hold()

    def after(self, length: int) -> None:
        """So many bytes were read."""
        if self._rate is None:
            return
        end = time.monotonic() + self._rate.take(length)
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _TICK))
            self._hold()


class Wrong(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with one file; `tensors` are names of those whose bytes are not as they were sealed."""

    file: str
    message: str
    tensors: tuple[str, ...] = ()


def reread(
    storage: Storage,
    key: str,
    sealed: File,
    pace: Pace | None = None,
    *,
    md5: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Wrong | None:
    """What is wrong with the file under `key`; None if every byte is as it was sealed. BLAKE3 alone, or MD5 too, where
    one is on record.

    Raises what says nothing about the bytes: CouldNotTellError and its kinds, ReadingStopped. Nothing is parsed.
    """
    # Not above: a daemon that reads nothing again needs none of it.
    from ckptguard.scan.lane import BLOCK, REMOTE_BLOCK
    from ckptguard.scan.sealed_stream import SealedStream

    pace = pace or Pace()
    try:
        entry = storage.stat(key)
    except ObjectMissingError:
        return Wrong(file=sealed.path, message="it is not there")
    if entry.kind != "file":
        return Wrong(file=sealed.path, message="it is no regular file")
    with storage.open(key) as reader:
        size = reader.entry.size
        if size != sealed.size:
            return Wrong(file=sealed.path, message=f"it has {size} bytes, and {sealed.size} were sealed")
        reader.done_with(0, size)  # what is in the page cache says nothing about the disk
        stream, whole = SealedStream(sealed), hashlib.md5(usedforsecurity=False) if md5 and sealed.md5 else None
        buffer = memoryview(bytearray(min(BLOCK if storage.root is not None else REMOTE_BLOCK, size)))
        looked = time.monotonic()
        for offset in range(0, size, len(buffer) or 1):
            pace.before()
            block = buffer[: min(len(buffer), size - offset)]
            reader.read_into(offset, block)
            reader.done_with(offset, len(block))
            stream.add(block)
            if whole is not None:
                whole.update(block)
            if progress is not None:
                progress(len(block))
            pace.after(len(block))
            if time.monotonic() - looked > _LOOK:
                reader.check_unchanged()
                looked = time.monotonic()
        reader.check_unchanged()
    if stream.wrong() is not None:
        hit = set(stream.wrong_spans)
        tensors = tuple(t.name for t in sealed.tensors if t.span in hit)
        return Wrong(file=sealed.path, message="its bytes are not those that were sealed", tensors=tensors)
    if whole is not None and whole.hexdigest() != sealed.md5:
        raise RecordsError(f"the MD5 on record of {sealed.path} is not that of its bytes, although BLAKE3 agrees")
    return None
