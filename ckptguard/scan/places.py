"""Digests of stated places of a file, whatever its own structure says: to name what was damaged."""

from __future__ import annotations

from collections.abc import Sequence

from ckptguard.errors import ChangedWhileReadError
from ckptguard.storage.protocol import Storage

_BLOCK = 4 * 1024**2


def digest_places(storage: Storage, key: str, places: Sequence[tuple[int, int]]) -> tuple[str | None, ...]:
    """BLAKE3 of each (offset, length); None where the file ends before. Memory is bounded by one block."""
    import blake3

    digests: list[str | None] = []
    with storage.open(key) as reader:
        for offset, length in places:
            hasher = blake3.blake3()
            try:
                for start in range(offset, offset + length, _BLOCK):
                    hasher.update(reader.read(start, min(_BLOCK, offset + length - start)))
                digests.append(hasher.hexdigest())
            except ChangedWhileReadError:
                digests.append(None)
    return tuple(digests)
