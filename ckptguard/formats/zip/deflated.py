"""Unpacking deflated records in bounded memory, within a bound on what they may become."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ckptguard.formats.zip.archive import Record
from ckptguard.formats.zip.crc import crc32_function
from ckptguard.storage.protocol import Reader

_READ = 1 << 16
_BLOCK = 1 << 20


class UnpackProblem(ValueError):
    """The record is not what the archive says; the message says why."""


def unpacked(reader: Reader, record: Record) -> Iterator[bytes]:
    """The record's contents, piece by piece, never more than `record.size` bytes.

    Whoever takes them all knows that size and CRC-32 are as stated: else UnpackProblem, at the latest at the end.
    """
    crc32 = crc32_function()
    check = size = 0
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    position, end = record.offset, record.offset + record.packed
    waiting = b""
    while not stream.eof:
        if not waiting and position < end:
            waiting = reader.read(position, min(_READ, end - position))
            position += len(waiting)
        try:
            block = stream.decompress(waiting, _BLOCK)
        except zlib.error as error:
            raise UnpackProblem("its compressed bytes are damaged") from error
        waiting = stream.unconsumed_tail
        size += len(block)
        if size > record.size:
            raise UnpackProblem("it unpacks to more than the archive says")
        check = crc32(block, check)
        if block:
            yield block
        elif not waiting and position == end and not stream.eof:
            raise UnpackProblem("its compressed bytes end early")
    if stream.unused_data or waiting or position != end:
        raise UnpackProblem("bytes follow its compressed ones")
    if size != record.size:
        raise UnpackProblem("it unpacks to less than the archive says")
    if check != record.crc32:
        raise UnpackProblem(f"it has CRC-32 {check:08x}, where the archive says {record.crc32:08x}")
