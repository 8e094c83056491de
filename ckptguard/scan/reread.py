"""Read a sealed file again, from the disk and not from the page cache, at a given pace."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from ckptguard.errors import ObjectMissingError
from ckptguard.scan.paced_reader import REMOTE_BLOCK, Pace, read_through
from ckptguard.storage.protocol import Storage
from ckptguard.values.manifest import File

_LOOK = 5.0  # seconds between checks that the file still exists: an open one keeps its space when removed


class ReadingStopped(Exception):
    """The pace's owner ended the reading. It says nothing about the bytes."""


class WrongFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with one file. `tensors` are those whose bytes differ from the sealed ones."""

    file: str
    message: str
    tensors: tuple[str, ...] = ()


def reread(
    storage: Storage, key: str, sealed: File, pace: Pace | None = None, also: Callable[[bytes], None] | None = None
) -> WrongFile | None:
    """Return what is wrong with the file at `key`, or None if every byte is as sealed. Nothing is parsed.

    It compares BLAKE3. `also` gets every block that is read, in order.
    Errors say nothing about the bytes: CouldNotTellError and its kinds, ReadingStopped.
    """
    try:
        entry = storage.stat(key)
    except ObjectMissingError:
        return WrongFile(file=sealed.path, message="it is missing")
    if entry.kind != "file":
        return WrongFile(file=sealed.path, message="it is not a regular file")
    return read_back(storage, key, sealed, pace, also)


def read_back(
    storage: Storage, key: str, sealed: File, pace: Pace | None = None, also: Callable[[bytes], None] | None = None
) -> WrongFile | None:
    """Do the same for an existing file. Raises ObjectMissingError, or DeniedError for what is not a regular file."""
    # Imported here, because a daemon that reads nothing again does not need it.
    from ckptguard.scan.sealed_stream import SealedStream
    from ckptguard.scan.thread_buffers import BLOCK

    with storage.open(key) as reader:
        size = reader.entry.size
        if size != sealed.size:
            return WrongFile(
                file=sealed.path, message=f"it has {size} bytes instead of the {sealed.size} that were sealed"
            )
        reader.done_with(0, size)  # the page cache says nothing about the disk
        stream = SealedStream(sealed)
        looked = time.monotonic()

        def take(block: bytes) -> None:
            nonlocal looked
            stream.add(block)
            if also is not None:
                also(block)
            if time.monotonic() - looked > _LOOK:
                reader.check_unchanged()
                looked = time.monotonic()

        remote = storage.root is None
        read_through(reader, take, pace or Pace(), block=REMOTE_BLOCK if remote else BLOCK, remote=remote)
        reader.check_unchanged()
    if stream.wrong() is not None:
        hit = set(stream.wrong_spans)
        tensors = tuple(t.name for t in sealed.tensors if t.span in hit)
        return WrongFile(file=sealed.path, message="its bytes differ from the sealed bytes", tensors=tensors)
    return None
