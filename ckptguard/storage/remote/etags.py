"""The ETag that S3 computes of an object: what the store itself says that it has received."""

from __future__ import annotations

import hashlib
from collections.abc import Callable


class ExpectedTag:
    """Takes the bytes of an object in order, as they are uploaded in parts of `part_size(number)` bytes: MD5, or for
    several parts the MD5 of their MD5s and their number. Stores that encrypt or are not S3 have other tags."""

    def __init__(self, part_size: Callable[[int], int]) -> None:
        self._part_size = part_size
        self._parts: list[bytes] = []
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._length = 0  # of the part at hand

    def add(self, block: bytes | memoryview) -> None:
        """The next bytes."""
        left = memoryview(block)
        while left:
            size = self._part_size(len(self._parts))
            piece = left[: size - self._length]
            self._md5.update(piece)
            self._length += len(piece)
            left = left[len(piece) :]
            if self._length == size:
                self._end_part()

    def is_that(self, tag: str | None) -> bool:
        """After the last byte: whether a store's tag says that it has these very bytes."""
        if self._parts:
            if self._length:
                self._end_part()
            sums = hashlib.md5(b"".join(self._parts), usedforsecurity=False).hexdigest()
            expected = f"{sums}-{len(self._parts)}"
        else:
            expected = self._md5.hexdigest()
        return tag is not None and tag.strip('"') == expected

    def _end_part(self) -> None:
        self._parts.append(self._md5.digest())
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._length = 0
