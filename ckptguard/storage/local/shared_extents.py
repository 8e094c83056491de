"""How much of a file only that file occupies: reflinks of it share the rest."""

from __future__ import annotations

import fcntl
import os
import struct

_FIEMAP = 0xC020660B  # _IOWR("f", 11, struct fiemap)
_SYNC, _LAST, _SHARED = 0x1, 0x1, 0x2000
_HEAD, _EXTENT = struct.Struct("=QQLLLL"), struct.Struct("=QQQQQLLLL")
_AT_ONCE = 256


def unshared_bytes(path: str) -> int | None:
    """Return the bytes of the blocks that no other file shares, or None if the file system does not say."""
    total = start = 0
    buffer = bytearray(_HEAD.size + _AT_ONCE * _EXTENT.size)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while True:
                _HEAD.pack_into(buffer, 0, start, (1 << 64) - 1 - start, _SYNC, 0, _AT_ONCE, 0)
                fcntl.ioctl(descriptor, _FIEMAP, buffer)
                count = _HEAD.unpack_from(buffer)[3]
                flags = _LAST
                for number in range(count):
                    at, _, length, _, _, flags, *_ = _EXTENT.unpack_from(buffer, _HEAD.size + number * _EXTENT.size)
                    total += 0 if flags & _SHARED else length
                    start = at + length
                if flags & _LAST:
                    return total
        finally:
            os.close(descriptor)
    except OSError:
        return None
